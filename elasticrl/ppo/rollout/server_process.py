"""A server of somebody else's on this machine, vLLM's or SGLang's, as an engine process's program: it is asked over HTTP.

The idea: its operator may start it anew at any time, with the weights that it began with. So the server itself keeps the name
of the weights that it was given, and it is asked for that name after an answer came and before the answer counts.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol
from urllib.parse import urlsplit

from elasticrl.base.parsed import parsed
from elasticrl.ppo.rollout import weights
from elasticrl.ppo.rollout.engine import Request, drawn
from elasticrl.ppo.rollout.process import Said
from elasticrl.ppo.rollout.service import Unfit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch

    from elasticrl.ppo.rollout.engine import Sampling
    from elasticrl.ppo.rollout.service import Service

TOKEN: Final = "ROLLOUT_SERVER_TOKEN"  # noqa: S105 - the name of a variable
MAX_REPLY: Final = 64 << 20
ASK_S: Final = 10.0  # for a question that costs the server nothing
LOOK_S: Final = 0.1  # between looks at what is under way
SIGN_S: Final = 1.0  # between two signs of life of a server that generates
FILE_BYTES: Final = 1 << 30  # of weights in one file
SAID: Final = 300  # characters of what a server says of itself
TRIES: Final = 3  # of one sample, where the server answers with an error
NOT_FOUND: Final = 404
# What a server may have other defaults of, from a model's generation_config.json: samples would not be of the distribution that
# is trained.
PLAIN: Final = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
UNDER_WAY: Final = "elasticrl-loads"  # what weights are called while they come


class Failed(RuntimeError):
    """The server did not do what it was asked; the sentence says what it said. `status` is HTTP's; 0: it did not answer."""

    def __init__(self, why: str, status: int = 0) -> None:
        super().__init__(why)
        self.status = status


class Http:
    """One server's. It is on this machine: no proxy, and no redirect is followed."""

    def __init__(self, url: str, token: str) -> None:
        parts = urlsplit(url)
        self.url, self._base = url, parts.path.rstrip("/")
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})

    def connect(self, within_s: float) -> http.client.HTTPConnection:
        """A new connection, of which each read has that much time."""
        return http.client.HTTPConnection(self._host, self._port, timeout=within_s)

    def ask(
        self, path: str, body: object = None, *, within_s: float, over: http.client.HTTPConnection | None = None
    ) -> Any:
        """What it answers, from JSON; None for nothing. Failed if that is no success."""
        line = over or self.connect(within_s)
        try:
            sent = None if body is None else json.dumps(body)
            line.request("GET" if body is None else "POST", self._base + path, sent, self._headers)
            reply = line.getresponse()
            text = reply.read(MAX_REPLY + 1)
        except (OSError, http.client.HTTPException) as error:
            raise Failed(f"{self.url}{path} did not answer ({error or type(error).__name__})") from error
        finally:
            line.close()
        if reply.status >= 300:
            said = text[:SAID].decode(errors="replace")
            raise Failed(f"{self.url}{path} answered HTTP {reply.status} {reply.reason}: {said}", reply.status)
        if len(text) > MAX_REPLY:
            raise Failed(f"{self.url}{path} answered over {MAX_REPLY} bytes")
        try:
            return parsed(text) if text else None
        except ValueError:
            raise Failed(f"{self.url}{path} answered something that is not JSON: {text[:SAID]!r}") from None


class Dialect(Protocol):
    """How one kind of server is spoken to."""

    kind: str
    version: str
    room: int | None  # tokens of prompt and answer that it takes; None: it does not say

    def load(self, folder: Path, name: str, within_s: float, *, again: bool) -> None:
        """Takes the weights in the folder, and calls them so. Failed if not. `again`: an earlier try may have broken off."""

    def holds(self) -> str:
        """The name of the weights that it has."""

    def asked(self, request: Request, tokens: int) -> tuple[str, dict[str, Any]]:
        """Path and body of one sample."""

    def said(self, reply: Any) -> tuple[tuple[int, ...], tuple[float, ...], bool]:
        """Tokens, their log-probabilities, and whether the answer ended by itself, from the reply."""


class Vllm:
    """`vllm serve`, with VLLM_SERVER_DEV_MODE=1 in its environment."""

    kind = "vllm"

    def __init__(self, link: Http, sampling: Sampling) -> None:
        self._link, self._sampling = link, sampling
        self.version = str(link.ask("/version", within_s=ASK_S)["version"])
        model = link.ask("/v1/models", within_s=ASK_S)["data"][0]
        self._model, self.room = str(model["id"]), model.get("max_model_len")
        try:
            self.holds()
        except Failed as error:
            if error.status != NOT_FOUND:
                raise
            raise Unfit(
                f"{error}. Start vLLM with VLLM_SERVER_DEV_MODE=1 in its environment: weights are given over "
                "/collective_rpc and named over /update_weight_version, which it has only then (and from version 0.30 on)."
            ) from error

    def load(self, folder: Path, name: str, within_s: float, *, again: bool) -> None:
        """As Dialect's. A reload that broke off leaves layers half filled, which the next one takes for its own: the one after
        that is clean. vLLM gets no limit of its own: past one its late answer would be taken for the next question's.
        """
        ends = time.monotonic() + within_s
        self._link.ask("/update_weight_version", {"new_version": UNDER_WAY}, within_s=ASK_S)
        for _ in range(2 if again else 1):
            body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
            self._link.ask("/collective_rpc", body, within_s=within_s)
        while not (self._link.ask("/reset_prefix_cache", {}, within_s=within_s) or {}).get("success"):
            if time.monotonic() > ends:
                raise Failed("vLLM keeps what it has computed by older weights: something is under way")
            time.sleep(LOOK_S)
        self._link.ask("/update_weight_version", {"new_version": name}, within_s=ASK_S)

    def holds(self) -> str:
        """The name that vLLM says its weights have."""
        return str(self._link.ask("/weight_info", within_s=ASK_S)["weight_version"])

    def asked(self, request: Request, tokens: int) -> tuple[str, dict[str, Any]]:
        """The completions of vLLM itself, which give token ids and their log-probabilities."""
        s = drawn(self._sampling, request.draw)
        return "/v1/completions", {
            "model": self._model, "prompt": list(request.prompt), "max_tokens": tokens, "seed": request.seed,
            "temperature": s.temperature, "top_p": s.top_p, "top_k": s.top_k or -1, **PLAIN,
            "logprobs": 0, "return_token_ids": True, "ignore_eos": True, "stop_token_ids": list(s.eos),
            "skip_special_tokens": False,
        }  # fmt: skip

    def said(self, reply: Any) -> tuple[tuple[int, ...], tuple[float, ...], bool]:
        """Out of the one choice of the reply. Failed if it ended for any other reason than a stop or its length."""
        (choice,) = reply["choices"]
        if (why := choice["finish_reason"]) not in ("stop", "length"):
            raise Failed(f"vLLM ended an answer by {why!r}")
        return tuple(choice["token_ids"]), tuple(choice["logprobs"]["token_logprobs"]), why == "stop"


class Sglang:
    """SGLang's own endpoints."""

    kind = "sglang"

    def __init__(self, link: Http, sampling: Sampling) -> None:
        self._link, self._sampling = link, sampling
        told = link.ask("/get_server_info", within_s=ASK_S)
        self.version = str(told.get("version", "?"))
        room = told.get("context_length") or told.get("max_total_num_tokens")
        self.room = int(room) if room else None
        if "weight_version" not in self._info():
            raise Unfit(
                f"SGLang {self.version} at {link.url} tells no weight_version in /get_model_info, so nobody could know by "
                "which weights it generates: take a newer one."
            )

    def _info(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self._link.ask("/get_model_info", within_s=ASK_S)
        return found

    def load(self, folder: Path, name: str, within_s: float, *, again: bool) -> None:
        """Has SGLang read the folder. `again` changes nothing: a reload that broke off is begun anew."""
        del again
        body = {"model_path": str(folder), "weight_version": name, "flush_cache": True}
        told = self._link.ask("/update_weights_from_disk", body, within_s=within_s)
        if not told.get("success"):
            raise Failed(f"SGLang took no weights: {str(told.get('message'))[:SAID]}")

    def holds(self) -> str:
        """The name that SGLang says its weights have."""
        return str(self._info()["weight_version"])

    def asked(self, request: Request, tokens: int) -> tuple[str, dict[str, Any]]:
        """SGLang's own endpoint, with token ids and log-probabilities."""
        s = drawn(self._sampling, request.draw)
        return "/generate", {
            "input_ids": list(request.prompt), "return_logprob": True,
            "sampling_params": {
                "max_new_tokens": tokens, "temperature": s.temperature, "top_p": s.top_p, "top_k": s.top_k or -1,
                **PLAIN,
                "ignore_eos": False,  # with it SGLang heeds no stop_token_ids either
                "stop_token_ids": list(s.eos), "skip_special_tokens": False, "no_stop_trim": True,
                "sampling_seed": request.seed % (1 << 31),
            },
        }  # fmt: skip

    def said(self, reply: Any) -> tuple[tuple[int, ...], tuple[float, ...], bool]:
        """Out of the reply's facts. Failed if it ended for any other reason than a stop or its length."""
        meta = reply["meta_info"]
        if (why := meta["finish_reason"]["type"]) not in ("stop", "length"):
            raise Failed(f"SGLang ended an answer by {why!r}")
        pairs = meta["output_token_logprobs"]
        return tuple(pair[1] for pair in pairs), tuple(float(pair[0]) for pair in pairs), why == "stop"


KINDS: Final[Mapping[str, type[Vllm | Sglang]]] = {"/get_model_info": Sglang, "/version": Vllm}


class ServerProgram:
    """Requests over HTTP, as many at a time as `rollout.server.at_once` says."""

    tells = True  # that it is alive, where its server shows it

    def __init__(self, service: Service) -> None:
        from transformers import AutoConfig

        assert service.server is not None, "the program server has one"
        self._service, self._sampling, self._asked = service, service.sampling, service.server
        self._link = Http(self._asked.url, os.environ.get(TOKEN, ""))
        self._server, self._ours = self._found()
        config: Any = AutoConfig.from_pretrained(service.model)
        self.vocabulary = int(config.get_text_config().vocab_size)
        self.versions = {self._server.kind: self._server.version}
        self._name: str | None = None  # of the weights that it was given
        self._sound = False  # no load of this process has broken off, and one has not
        self._pool = ThreadPoolExecutor(self._asked.at_once, thread_name_prefix="asks")
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="asks for a sign")
        self._under_way: dict[str, Future[Said]] = {}
        self._lines: dict[str, http.client.HTTPConnection] = {}  # by key, to be cut
        self._sign: Future[Said] | None = None
        self._signed = 0.0

    def _found(self) -> tuple[Dialect, socket.socket]:
        """Waits for the server, for as long as who started this process waits for it: it may be starting, or busy, or still
        with another job. What only its operator can mend is Unfit at once.
        """
        said = set[str]()
        while True:
            whys: list[str] = []
            for path, kind in KINDS.items():
                try:
                    self._link.ask(path, within_s=ASK_S)
                    server: Dialect = kind(self._link, self._sampling)
                    self._check_room(server.room)
                    return server, claimed(self._asked.url)
                except Failed as error:
                    if error.status in (401, 403):
                        raise Unfit(f"{error}. Set {TOKEN} in agent.env to the key that the server wants.") from error
                    whys.append(str(error))
            why = "; ".join(whys)
            if why not in said:
                said.add(why)
                print(f"waiting for a server: {why}", flush=True)
            time.sleep(SIGN_S)

    def _check_room(self, room: int | None) -> None:
        need = self._sampling.prompt_tokens + self._sampling.max_tokens
        if room is not None and room < need:
            raise Unfit(
                f"the server at {self._asked.url} takes {room} tokens at most, and data.max_prompt, rollout.max_tokens "
                f"and, with an environment, environment.turn_tokens are {need} together: start it with a longer context, or "
                "lower them."
            )

    def load(self, home: Path, tag: weights.Tag) -> None:
        """As Program's. Ends this process if the server does not take them."""
        self._name = None
        # Ours alone while we hold the server. What an earlier process left there goes.
        mine = f"elasticrl-weights-{urlsplit(self._asked.url).port or 80}"
        folder = Path(self._asked.weights or home) / mine / str(tag.version)
        again, self._sound = not self._sound, False
        try:
            shutil.rmtree(folder.parent, ignore_errors=True)
            store(weights.read(home, tag, within_s=1.0), folder, model=Path(self._service.model))
            if self._asked.weights:  # for a server of this group
                opened(folder)
            name = named(tag)
            self._server.load(folder, name, self._asked.load_s, again=again)
            if (found := self._server.holds()) != name:
                raise Failed(f"it calls its weights {found!r}, and was told to call them {name!r}")
        except (Failed, OSError, KeyError, TypeError, ValueError) as error:
            # The weights are good, so who asked for this asks the next process. The folder stays until then: the server may be
            # reading it still.
            gave_up(f"the server at {self._asked.url} did not take the weights: {error}")
        shutil.rmtree(folder.parent, ignore_errors=True)  # what is not needed any more would stay in memory
        self._name, self._sound = name, True

    def add(self, key: str, request: Request, *, tokens: int | None = None) -> None:
        """Asks the server in a thread, for one more sample."""
        most = tokens or drawn(self._sampling, request.draw).max_tokens
        self._under_way[key] = self._pool.submit(self._ask, key, request, most)

    def drop(self, keys: Iterable[str]) -> None:
        """As Program's. A server gives up what nobody listens for any more."""
        for key in keys:
            if (future := self._under_way.pop(key, None)) is not None and not future.cancel():
                line = self._lines.get(key)
                if line is not None and line.sock is not None:
                    with suppress(OSError):
                        line.sock.shutdown(socket.SHUT_RDWR)

    def step(self, alive: Callable[[], None]) -> Iterable[Said]:
        """As Program's. It is alive while answers come, or a short question beside them is answered."""
        self._look_for_a_sign()
        signs = [self._sign] if self._sign else []
        done = wait([*self._under_way.values(), *signs], LOOK_S, FIRST_COMPLETED).done
        over = [key for key, future in self._under_way.items() if future in done]
        try:
            found = [self._under_way.pop(key).result() for key in over]
            if self._sign in done:
                sign, self._sign = self._sign, None
                assert sign is not None
                sign.result()
            if found and self._name is not None and (name := self._server.holds()) != self._name:
                raise Failed(f"it calls its weights {name!r} now, not {self._name!r}: it was started anew")
        except (Failed, KeyError, TypeError, ValueError, IndexError) as error:
            gave_up(f"the server at {self._asked.url} is not to be trusted any more: {error!r:.500}")
        if done:
            self._signed = time.monotonic()
            alive()
        return found

    def close(self) -> None:
        """Lets go of the server. What is under way is cut."""
        self.drop(list(self._under_way))
        for pool in (self._pool, self._beside):
            pool.shutdown(cancel_futures=True)
        self._ours.close()

    def _look_for_a_sign(self) -> None:
        """One token, beside what takes long: a server that hangs takes questions and answers none."""
        now = time.monotonic()
        if self._under_way and self._sign is None and now > self._signed + SIGN_S:
            request = Request(id="sign", prompt=(self._sampling.pad,), seed=0)
            self._sign = self._beside.submit(self._ask, "sign", request, 1)

    def _ask(self, key: str, request: Request, tokens: int) -> Said:
        """In a thread of the pool. What fails once is asked again: a server sheds what it cannot take at the moment."""
        path, body = self._server.asked(request, tokens)
        for left in reversed(range(TRIES)):
            line = self._lines[key] = self._link.connect(self._asked.answer_s)
            try:
                reply = self._link.ask(path, body, within_s=self._asked.answer_s, over=line)
                said, logprobs, ended = self._server.said(reply)
                break
            except Failed as error:
                if not left or not error.status or key not in self._under_way:
                    raise
                time.sleep(SIGN_S)
            finally:
                self._lines.pop(key, None)
        if len(said) != len(logprobs) or not 0 < len(said) <= tokens:
            raise Failed(f"it said {len(said)} tokens with {len(logprobs)} log-probabilities, where 1 to {tokens} fit")
        if ended and said[-1] not in self._sampling.eos:
            raise Failed(
                f"it ended an answer at token {said[-1]}, which ends none here ({list(self._sampling.eos)} do)"
            )
        return Said(key=key, tokens=said, logprobs=logprobs, ended=ended)


def named(tag: weights.Tag) -> str:
    """What a server calls these weights.

    >>> named(weights.Tag(life="14 10.0.0.3:41327", version=2560))
    'elasticrl-2560-61222f47'
    """
    return f"elasticrl-{tag.version}-{hashlib.blake2b(tag.life.encode(), digest_size=4).hexdigest()}"


def store(given: Iterable[tuple[str, torch.Tensor]], folder: Path, *, model: Path) -> None:
    """A checkpoint of transformers' kind, some files of weights beside the model's configuration."""
    from safetensors.torch import save_file

    folder.mkdir(mode=0o700, parents=True)
    folder.parent.chmod(0o700)  # a parent's mode is the umask's
    some: dict[str, torch.Tensor] = {}
    size = count = 0

    def write() -> None:
        nonlocal some, size, count
        count += 1
        save_file(some, folder / f"model-{count:05}.safetensors", {"format": "pt"})
        some, size = {}, 0

    for name, tensor in given:
        some[name] = tensor.clone()  # a bucket's lie in one buffer
        size += tensor.nbytes
        if size >= FILE_BYTES:
            write()
    if some:
        write()
    if (config := model / "config.json").is_file():
        shutil.copyfile(config, folder / "config.json")


def opened(folder: Path) -> None:
    """For those of our group too, who only read."""
    for place in (folder.parent, folder, *folder.iterdir()):
        place.chmod(0o750 if place.is_dir() else 0o640)


def claimed(url: str) -> socket.socket:
    """Holds the server for this process: of two that give it weights, neither would know by which it generates. Failed if
    another has it. The kernel lets go of it when we end.
    """
    mark = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    where = urlsplit(url)
    try:
        mark.bind(f"\0elasticrl-server-{where.port or 80}")
    except OSError as error:
        mark.close()
        raise Failed(
            f"another job's engine on this machine uses the server at {url}, and of two that give it weights neither would "
            "know by which it generates: end that job, or start a server for each and name its address in rollout.server.url"
        ) from error
    return mark


def gave_up(why: str) -> NoReturn:
    """Ends this process at once: who is beside it starts another, which waits for the server and gives it the weights anew."""
    print(why, flush=True)
    sys.stdout.flush()
    os._exit(1)
