"""The OpenAI server of an unmodified vLLM over HTTP: its greedy tokens are those of ringtide.

The models are untrained, in the shape of laplace-tiny, with weights that make their tokens a fair test: matrices three
times as large as at the start of a training and a seed for which the likeliest token always wins by 0.002, where
rounding moves a logit by 0.00001; an unembedding of its own, so that tokens do not repeat; and gates that remember
hundreds of tokens.
"""

import ctypes
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest
import torch

from ringtide.models import byte_tokenizer, laplace_weights
from ringtide.models.laplace import PRESETS, LaplaceForCausalLM, init_weights
from ringtide.torch import StatePool

LENGTHS = 1, 2, 3, 4, 5, 16, 17, 63, 64, 65, 100, 128, 129, 190, 257, 400  # of the prompts
TOKENS = 24  # that follow each
CHUNK = 64  # tokens of a batch
BLOCKS = 7  # of the pool, one of which vLLM keeps for itself: 16 prompts take turns
WAIT = 600  # seconds for a server to come up; it compiles on whatever is left of two cores
OPTIONS = "--max-model-len=512", f"--max-num-batched-tokens={CHUNK}", f"--num-gpu-blocks-override={BLOCKS}"


@torch.no_grad()
def make(**shape):
    model = init_weights(LaplaceForCausalLM(replace(PRESETS["laplace-tiny"], **shape)), seed=2)
    for name, p in model.named_parameters():
        if p.ndim == 2 and "embed" not in name:
            p.mul_(3)
        if name.endswith("gk_proj.1.bias"):
            p.fill_(4)  # log sigmoid(4) / 16: a token before is worth e^-0.001
    return model


def prompts():
    draw = random.Random(2)
    return [[draw.randrange(256) for _ in range(length)] for length in LENGTHS]


@pytest.fixture(scope="module")
def model():
    return make(tied=False)


@pytest.fixture(scope="module")
def ours(model):
    """What `ringtide generate` gives, and that the plain forward pass of the whole text says the same, by a margin."""
    torch.set_num_threads(1)
    pool = StatePool(model, slots=len(LENGTHS))
    ids = [pool.add(prompt) for prompt in prompts()]
    tokens = {id: [] for id in ids}
    while any(len(taken) < TOKENS for taken in tokens.values()):
        for id, token in pool.step().items():
            tokens[id].append(token)
    tokens = [tokens[id][:TOKENS] for id in ids]
    for prompt, taken in zip(prompts(), tokens, strict=True):
        logits = scores(model, prompt, taken)
        assert logits.argmax(-1).tolist() == taken
        first, second = logits.topk(2).values.T
        assert (first - second).min() > 1e-3
    return tokens


@torch.no_grad()
def scores(model, prompt, taken):
    """[len(taken), vocabulary]: the logits before each token."""
    return model(torch.tensor([prompt + taken[:-1]]))[0, len(prompt) - 1 :]


def test_the_longest_prompt_matters_to_its_first_token(model, ours):
    """Else a state that is lost on the way would go unnoticed."""
    prompt = prompts()[-1]
    logits = scores(model, [(prompt[0] + 1) % 256, *prompt[1:]], ours[-1])
    assert logits.argmax(-1).tolist() != ours[-1]


@contextmanager
def server(folder, *options):
    """Serves a model's folder on loopback, gives the address, and leaves no process behind."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", f"--model={folder}", *options]
    command += ["--served-model-name=laplace", "--host=127.0.0.1", f"--port={port}", *OPTIONS]
    # A cache of its own: what is compiled is compiled here.
    environment = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache" / "inductor"),
    }
    die = ctypes.CDLL(None).prctl
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: die(1, signal.SIGTERM),  # PR_SET_PDEATHSIG: also if the tests are killed
        )
    try:
        address = f"http://127.0.0.1:{port}"
        begun = time.monotonic()
        while not answers(address + "/health"):
            if process.poll() is not None or time.monotonic() - begun > WAIT:
                raise AssertionError((folder / "log").read_text()[-4000:])
            time.sleep(0.5)
        print(f"{' '.join(options)}: up after {time.monotonic() - begun:.0f} s")
        yield address
    finally:
        stop(process)


def stop(process):
    process.send_signal(signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(30)
    for _ in range(100):  # the engine and its worker are of the same group
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        process.poll()
        time.sleep(0.1)
    raise AssertionError("the server does not die")


def answers(url):
    try:
        return urllib.request.urlopen(url, timeout=5).status == 200
    except OSError:
        return False


def post(address, timeout=300, **body):
    body = {"model": "laplace", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True} | body
    request = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    return urllib.request.urlopen(request, timeout=timeout)


def complete(address, prompt, **body):
    with post(address, prompt=prompt, return_token_ids=True, **body) as answer:
        return json.load(answer)["choices"][0]


def metric(address, name):
    text = urllib.request.urlopen(f"{address}/metrics", timeout=30).read().decode()
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"vllm:{name}{{"))


def wave(address, order):
    """Prompts sent at once, in an order: the tokens of each, and the largest number seen to run together."""
    with ThreadPoolExecutor(len(order)) as threads:
        sent = {i: threads.submit(complete, address, prompts()[i]) for i in order}
        together = 0
        while not all(answer.done() for answer in sent.values()):
            together = max(together, metric(address, "num_requests_running"))
            time.sleep(0.01)
        return [sent[i].result()["token_ids"] for i in sorted(sent)], together


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_greedy_tokens_over_http(model, ours, mode, tmp_path):
    laplace_weights.save(tmp_path, model)
    options = ["--dtype=float32", "--skip-tokenizer-init", *(["--enforce-eager"] if mode == "eager" else [])]
    order = list(range(len(LENGTHS)))
    with server(tmp_path, *options) as address:
        tokens, together = wave(address, order)
        assert tokens == ours
        assert together == BLOCKS - 1
        # The same again through blocks that others have used, in another order.
        random.Random(3).shuffle(order)
        assert wave(address, order)[0] == ours
        # Clients that go away, in the middle of a prompt and in the middle of an answer.
        long = [7] * 480
        reading = [post(address, prompt=long, max_tokens=30, stream=True) for _ in range(4)]
        answering = [post(address, prompt=[7], max_tokens=500, stream=True) for _ in range(4)]
        assert answering[0].readline().startswith(b"data:")
        for request in reading + answering:
            request.close()
        until = time.monotonic() + 60
        while metric(address, "num_requests_running") + metric(address, "num_requests_waiting"):
            assert time.monotonic() < until, "aborted requests still run"
            time.sleep(0.1)
        assert metric(address, "kv_cache_usage_perc") == 0
        assert wave(address, order)[0] == ours
    log = (tmp_path / "log").read_text()
    assert ("Warming up model for the compilation" in log) == (mode == "compiled")


def test_text_in_bfloat16_without_a_convolution(tmp_path):
    """Another shape: no convolution, heads that share k, v and g, a tied embedding; and text instead of tokens."""
    model = make(conv=0, kv_heads=1).bfloat16()
    laplace_weights.save(tmp_path, model)
    byte_tokenizer.save(tmp_path)
    with server(tmp_path, "--enforce-eager") as address:
        for text in ("T", "The tide rises, the tide falls,\n" * 9, "Ebbe und Flut: größer, 潮"):
            answer = complete(address, text)
            prompt, taken = list(text.encode()), answer["token_ids"]
            assert answer["prompt_token_ids"] == prompt
            text = bytes(taken).replace(b"\0", b"").decode(errors="replace")
            assert answer["text"] == text.rstrip("\ufffd")  # it waits for the rest of a character
            # Rounding decides between tokens that are about as likely: what was taken must be one of them.
            logits = scores(model, prompt, taken)
            behind = logits.max(-1).values - logits.gather(-1, torch.tensor(taken)[:, None])[:, 0]
            assert behind.max() < 0.02 * logits.std()


def test_what_cannot_be_served_is_refused(tmp_path):
    laplace_weights.save(tmp_path, make())
    options = "--skip-tokenizer-init", "--enable-prefix-caching"
    with pytest.raises(AssertionError, match="leave out --enable-prefix-caching"), server(tmp_path, *options):
        pass
