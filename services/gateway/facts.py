"""The routes that only tell what is so: from memory, so that load never delays them."""

from aiohttp import web

from services.gateway.desk import Desk
from services.gateway.formats import Model, ModelList, Ready, to_json
from shared.errors import UnknownModel

MAX_SHOWN_CHARACTERS = 256


def json_response(body: bytes, *, status: int = 200) -> web.Response:
    """Return an answer that is JSON already."""
    return web.Response(body=body, status=status, content_type="application/json")


def unknown_model(name: str) -> UnknownModel:
    """Return the error for a model that is not served here."""
    return UnknownModel(f"the model {name[:MAX_SHOWN_CHARACTERS]!r} does not exist here", param="model")


class Facts:
    """What a gateway knows of itself and of its pool."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def health(self, request: web.Request) -> web.Response:  # noqa: ARG002 - the signature of a handler
        """Say that this process is alive."""
        return json_response(b'{"status":"ok"}')

    async def ready(self, request: web.Request) -> web.Response:  # noqa: ARG002 - the signature of a handler
        """Say whether a request would be served now."""
        why = self._desk.pool.why_not_serving(self._desk.clock())
        return json_response(to_json(Ready(ready=why is None, reason=why)), status=200 if why is None else 503)

    async def models(self, request: web.Request) -> web.Response:  # noqa: ARG002 - the signature of a handler
        """List the one model of this pool."""
        return json_response(to_json(ModelList([self._model()])))

    async def model(self, request: web.Request) -> web.Response:
        """Describe one model."""
        name = request.match_info["name"]
        if name != self._desk.model:
            raise unknown_model(name)
        return json_response(to_json(self._model()))

    def _model(self) -> Model:
        desk = self._desk
        return Model(desk.model, desk.created, desk.model, desk.pool.length_served or None)
