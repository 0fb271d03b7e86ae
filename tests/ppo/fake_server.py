"""A server that generates, as vLLM and SGLang answer over HTTP: really, with a tiny model of transformers.

    python fake_server.py --dialect vllm|sglang --port 8000 --model FOLDER [--token WORD] [--room 2048] [--hang FILE]

It begins with the model's own weights, and calls them "default". While the file of --hang exists it answers no sample.
"""

import argparse
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM


class State:
    def __init__(self, model: str) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(model).eval()
        self.name, self.lock, self.loads, self.resets = "default", threading.Lock(), 0, 0

    def load(self, folder: str) -> None:
        found: dict[str, torch.Tensor] = {}
        for file in sorted(Path(folder).glob("*.safetensors")):
            found |= load_file(file)
        with self.lock:
            lacking = self.model.load_state_dict(found, strict=False).missing_keys
            assert not [name for name in lacking if name != "lm_head.weight"], lacking
            self.loads += 1

    def sample(
        self, prompt: list[int], count: int, seed: int, ends: list[int], heat: float
    ) -> tuple[list[int], list[float], bool]:
        chance, tokens, logprobs = torch.Generator().manual_seed(seed), list(prompt), list[float]()
        for _ in range(count):
            with self.lock, torch.no_grad():
                row = self.model(torch.tensor([tokens])).logits[0, -1].float().log_softmax(-1)
            likely = (row / heat).softmax(-1) if heat else row
            token = int(torch.multinomial(likely, 1, generator=chance)) if heat else int(row.argmax())
            tokens.append(token)
            logprobs.append(float(row[token]))
            if token in ends:
                return tokens[len(prompt) :], logprobs, True
        return tokens[len(prompt) :], logprobs, False


class Handler(BaseHTTPRequestHandler):
    state: State
    options: argparse.Namespace
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def reply(self, body: object, status: int = 200) -> None:
        text = b"" if body is None else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_GET(self) -> None:
        self.answer({})

    def do_POST(self) -> None:
        self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def answer(self, body: dict[str, Any]) -> None:
        token = self.options.token
        if token and self.headers.get("Authorization") != f"Bearer {token}":
            self.reply({"error": "Unauthorized"}, 401)
            return
        known = VLLM if self.options.dialect == "vllm" else SGLANG
        if self.path not in known:
            self.reply({"detail": "Not Found"}, 404)
            return
        try:
            self.reply(known[self.path](self, body))
        except BrokenPipeError:
            pass
        except Exception as error:  # noqa: BLE001 - as a server would
            self.reply({"error": repr(error)}, 500)

    # vLLM's

    def models(self, _: Any) -> object:
        return {"data": [{"id": "tiny", "max_model_len": self.options.room}]}

    def rpc(self, body: Any) -> object:
        assert body["method"] == "reload_weights"
        self.state.load(body["kwargs"]["weights_path"])
        return {"results": [None]}

    def reset(self, _: Any) -> object:
        """While something runs, vLLM keeps what it has computed, and says so in a success of HTTP."""
        self.state.resets += 1
        return {"success": self.state.resets % 2 == 0}

    def call(self, body: Any) -> object:
        self.state.name = body["new_version"]
        return {"success": True, "new_version": self.state.name}

    def completion(self, body: Any) -> object:
        self.hang()
        assert body["model"] == "tiny"
        said, logprobs, ended = self.state.sample(
            body["prompt"], body["max_tokens"], body["seed"], body["stop_token_ids"], body["temperature"]
        )
        choice = {
            "token_ids": said, "logprobs": {"token_logprobs": logprobs}, "finish_reason": "stop" if ended else "length",
        }  # fmt: skip
        return {"choices": [choice]}

    # SGLang's

    def update(self, body: Any) -> object:
        self.state.load(body["model_path"])
        self.state.name = body["weight_version"]
        return {"success": True, "message": "Succeeded to update model weights."}

    def generate(self, body: Any) -> object:
        self.hang()
        asked = body["sampling_params"]
        said, logprobs, ended = self.state.sample(
            body["input_ids"], asked["max_new_tokens"], asked["sampling_seed"],
            [] if asked["ignore_eos"] else asked["stop_token_ids"],  # as SGLang does
            asked["temperature"],
        )  # fmt: skip
        meta = {
            "finish_reason": {"type": "stop" if ended else "length"},
            "output_token_logprobs": [[p, t, None] for p, t in zip(logprobs, said, strict=True)],
            "weight_version": self.state.name,
        }
        return {"text": "", "output_ids": said, "meta_info": meta}

    def hang(self) -> None:
        while self.options.hang and Path(self.options.hang).exists():
            time.sleep(0.05)


VLLM: dict[str, Any] = {
    "/version": lambda _h, _b: {"version": "0.32.0"},
    "/v1/models": Handler.models,
    "/weight_info": lambda h, _b: {"weight_version": h.state.name},
    "/collective_rpc": Handler.rpc,
    "/reset_prefix_cache": Handler.reset,
    "/update_weight_version": Handler.call,
    "/v1/completions": Handler.completion,
}
SGLANG: dict[str, Any] = {
    "/get_server_info": lambda h, _b: {"version": "0.6.1", "context_length": h.options.room},
    "/get_model_info": lambda h, _b: {"model_path": h.options.model, "weight_version": h.state.name},
    "/update_weights_from_disk": Handler.update,
    "/generate": Handler.generate,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dialect", choices=("vllm", "sglang"), required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--token", default="")
    parser.add_argument("--room", type=int, default=2048)
    parser.add_argument("--hang", default="")
    Handler.options = parser.parse_args()
    torch.set_num_threads(1)
    Handler.state = State(Handler.options.model)
    ThreadingHTTPServer(("127.0.0.1", Handler.options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
