"""The services: gateway, scheduler, worker, and the command line that starts them."""
