"""An honest client: sends load to any OpenAI-compatible server and says what a user of it would have seen."""
