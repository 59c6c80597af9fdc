"""An OpenAI-compatible server without a model: answers by a function, fails where it is told to, remembers what it was asked."""

import json

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route


class FakeServer:
    """`answer(body)` gives (text, reasoning, finish); `fails`: what the next requests get instead, in order.

    Attributes:
        bodies: what was asked; most: most requests under way at once.
    """

    def __init__(self, answer=lambda body: ("a", "", "stop"), enforce=("choice",), tokens=(10, 3, 0)):
        self.answer, self.enforce, self.tokens = answer, enforce, tokens
        self.fails, self.bodies, self.keys = [], [], []
        self.now = self.most = 0
        self.usage = True
        self.gate = None

    @property
    def transport(self):
        app = Starlette(routes=[Route("/v1/chat/completions", self.chat, methods=["POST"]),
                                Route("/v1/completions", self.complete, methods=["POST"])])  # fmt: skip
        return httpx.ASGITransport(app)

    async def chat(self, request: Request):
        body = await request.json()
        self.bodies.append(body)
        self.keys.append(request.headers.get("authorization"))
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            if self.gate is not None:
                await self.gate(body)
            if self.fails:
                failed = self.fails.pop(0)
                if isinstance(failed, Exception):
                    raise failed
                if failed is not None:
                    return failed
            return self._chat(body)
        finally:
            self.now -= 1

    def _chat(self, body):
        choices, shape = self._labels(body)
        text, thought, finish = self.answer(body)
        if choices is not None and shape in self.enforce and text not in choices:
            text = choices[0]
        if choices is not None and shape == "json_schema" and shape in self.enforce:
            text = json.dumps({"label": text})
        if choices is not None and shape == "enum_schema" and shape in self.enforce:
            text = json.dumps(text)
        given, out, thinking = self.tokens
        message = {"role": "assistant", "content": text, "reasoning_content": thought}
        tree = {
            "id": "x",
            "object": "chat.completion",
            "choices": [{"index": 0, "message": message, "finish_reason": finish}],
        }
        if self.usage:
            tree["usage"] = {"prompt_tokens": given, "completion_tokens": out, "total_tokens": given + out,
                             "completion_tokens_details": {"reasoning_tokens": thinking}}  # fmt: skip
        if body.get("stream"):
            return StreamingResponse(
                self._events(text, thought, finish, tree.get("usage")), media_type="text/event-stream"
            )
        return JSONResponse(tree)

    async def _events(self, text, thought, finish, usage):
        for key, said in (("reasoning_content", thought), ("content", text)):
            for word in said.split(" ") if said else []:
                yield f"data: {json.dumps({'choices': [{'index': 0, 'delta': {key: word + ' '}}]})}\n\n"
        yield f"data: {json.dumps({'choices': [{'index': 0, 'delta': {}, 'finish_reason': finish}]})}\n\n"
        if usage:
            yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n"
        yield "data: [DONE]\n\n"

    def _labels(self, body):
        if "structured_outputs" in body:
            return body["structured_outputs"]["choice"], "choice"
        if "guided_choice" in body:
            return body["guided_choice"], "guided_choice"
        schema = body.get("response_format", {}).get("json_schema", {}).get("schema")
        if schema is None:
            return None, None
        if schema.get("type") == "string":
            return schema["enum"], "enum_schema"
        return schema["properties"]["label"]["enum"], "json_schema"

    async def complete(self, request: Request):
        body = await request.json()
        self.bodies.append(body)
        if not body.get("echo"):
            return JSONResponse({"error": {"message": "echo only"}}, status_code=400)
        choices = [
            {"index": k, "text": "", "logprobs": {"token_logprobs": [None, *(-(t % 7) / 7 for t in ids[1:])]}, "finish_reason": "length"}
            for k, ids in enumerate(body["prompt"])
        ]  # fmt: skip
        return JSONResponse(
            {
                "choices": choices[::-1],
                "usage": {"prompt_tokens": sum(map(len, body["prompt"])), "completion_tokens": 0},
            }
        )


def error(status, said="no", **headers):
    return JSONResponse(
        {"error": {"message": said}}, status_code=status, headers={k.replace("_", "-"): v for k, v in headers.items()}
    )


def broken():
    return PlainTextResponse("<html>gateway</html>", status_code=200)


async def no_sleep(seconds):
    return None
