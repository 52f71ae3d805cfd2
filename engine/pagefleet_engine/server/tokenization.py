"""`POST /tokenize` and `POST /detokenize`, with vLLM's bodies."""

from __future__ import annotations

import msgspec
from pagefleet_protocol.openai_chat import MAX_CONTENT_CHARS, read_messages
from pagefleet_protocol.openai_common import MAX_MODEL_CHARS, MAX_TOKEN_ID, refuse_unsupported
from pagefleet_protocol.openai_json import Fields
from starlette.requests import Request
from starlette.responses import Response

from pagefleet_engine.server.responses import json_response
from pagefleet_engine.server.service import Service

_MAX_TOKENS = 2**20


class TokenizationRoutes:
    """Text to token ids and back."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def tokenize(self, request: Request) -> Response:
        """Return the ids of `prompt`, or of `messages` as chat would render them.

        Raises:
            BodyError, InvalidRequest, HttpRefusal: the client's mistake.
        """
        fields = await self._fields(request)
        if fields.raw("messages") is not None:
            messages = read_messages(fields)
            generation = fields.boolean("add_generation_prompt") is not False
            ids = await self._service.prompts.of_chat(messages, generation)
        else:
            prompt = fields.string("prompt", MAX_CONTENT_CHARS)
            if prompt is None:
                raise fields.missing("prompt")
            special = fields.boolean("add_special_tokens") is not False
            ids = await self._service.prompts.token_ids_of(prompt, special)
        limit = self._service.model.max_model_len
        return json_response(msgspec.json.encode({"count": len(ids), "max_model_len": limit, "tokens": ids}))

    async def detokenize(self, request: Request) -> Response:
        """Return the text of `tokens`, special ones included.

        Raises:
            BodyError, InvalidRequest, HttpRefusal: the client's mistake.
        """
        fields = await self._fields(request)
        tokens = fields.integers("tokens", _MAX_TOKENS, 0, MAX_TOKEN_ID)
        if tokens is None:
            raise fields.missing("tokens")
        text = await self._service.prompts.text_of(tokens)
        return json_response(msgspec.json.encode({"prompt": text}))

    async def _fields(self, request: Request) -> Fields:
        fields = Fields(await self._service.read_body(request))
        refuse_unsupported(fields)
        model = fields.string("model", MAX_MODEL_CHARS)
        if model is not None:
            self._service.check_model(model)
        return fields
