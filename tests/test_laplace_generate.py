"""The pool of states: each sequence as if it were alone, bit for bit; what it refuses; text from the command line."""

import json
import random

import pytest

torch = pytest.importorskip("torch")

from click.testing import CliRunner  # noqa: E402
from tokenizers import Tokenizer, models  # noqa: E402

from ringtide.cli import main  # noqa: E402
from ringtide.models import BadInput, laplace_generate, laplace_weights  # noqa: E402
from ringtide.models.laplace import PRESETS, LaplaceForCausalLM, init_weights, state_bytes  # noqa: E402
from ringtide.models.vocabulary import Bytes  # noqa: E402
from ringtide.torch import StatePool  # noqa: E402


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def loud(preset):
    """A model whose layers say more than its embedding, so that no token just comes again."""
    model = init_weights(LaplaceForCausalLM(PRESETS[preset]), 0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 2:
                p.normal_(0, 0.1 if "embed" in name else p.shape[1] ** -0.5, generator=generator)
            elif "conv1d" in name:
                p.uniform_(-0.5, 0.5, generator=generator)
    return model.requires_grad_(False)


@pytest.fixture(scope="module")
def model():
    return loud("laplace-micro")


def requests_of(count, longest, most, seed=0):
    """(prompt, how many tokens to generate) of each."""
    draw = random.Random(seed)
    lengths = [draw.choice((1, 2, 3, longest // 2, longest, draw.randint(1, longest))) for _ in range(count)]
    return [([draw.randrange(256) for _ in range(n)], draw.randint(1, most)) for n in lengths]


def serve(pool, requests, order):
    """{request: float32 logits [its tokens, vocabulary]} of the pool, filled in this order as soon as there is room."""
    seen, left, order = {i: [] for i in order}, {i: requests[i][1] for i in order}, list(order)
    most = 0

    def recorder(i):
        def choose(logits):
            seen[i].append(logits.clone())
            return logits.argmax()

        return choose

    while order or len(pool):
        while order and pool.free:
            i = order.pop(0)
            pool.add(requests[i][0], id=i, choose=recorder(i))
        most = max(most, len(pool))
        for i, token in pool.step().items():
            assert token == seen[i][-1].argmax()
            left[i] -= 1
            if not left[i]:
                pool.remove(i)
    assert most == min(pool.slots, len(seen))
    assert not any(x.any() for x in pool.cache.values())
    return {i: torch.stack(logits) for i, logits in seen.items()}


def assert_alone(model, request, logits, bound=1e-4):
    """The tokens and logits are those of the plain model on this sequence and no other: to rounding, which is another
    in matrices of another height. A first token reads (q . k) v, normed: where q . k nearly cancels, rounding grows.
    """
    prompt, count = request
    tokens = logits.argmax(-1)
    want = model(torch.tensor([[*prompt, *tokens.tolist()]]))[0, len(prompt) - 1 : -1]
    assert len(logits) == count
    # Where two are as likely to the last bits, the other may be chosen; what follows is compared after that choice.
    assert (want.max(-1).values - want.gather(1, tokens[:, None])[:, 0]).max() <= 2 * bound * want.abs().max()
    assert (logits - want).abs().max() <= bound * want.abs().max()


def thousand(model, count, sample, **sizes):
    """Fills 1,280 slots, drains and refills them; a `sample` of sequences is run again elsewhere, and alone."""
    requests = requests_of(count, **sizes)
    make = lambda: StatePool(model, 1280, chunk=sizes["longest"] * 2 // 3, rows=64)
    pool = make()
    held = pool.nbytes
    found = serve(pool, requests, range(count))
    assert pool.nbytes == held == 1280 * state_bytes(model.config, torch.float32)
    draw = random.Random(1)
    order = draw.sample(range(count), count // 4)  # other slots, at other times, among others
    for i, logits in serve(make(), requests, order).items():
        torch.testing.assert_close(logits, found[i], rtol=0, atol=0)
    for i in draw.sample(range(count), 2):
        torch.testing.assert_close(serve(make(), requests, [i])[i], found[i], rtol=0, atol=0)
    for i in draw.sample(range(count), sample):
        assert_alone(model, requests[i], found[i])


def test_1280_sequences_are_each_as_if_alone(model):
    thousand(model, 1600, sample=150, longest=24, most=6)


@pytest.mark.slow
def test_1280_sequences_of_laplace_tiny_are_each_as_if_alone():
    thousand(loud("laplace-tiny"), 2000, sample=500, longest=96, most=24)


@pytest.mark.parametrize("seed", range(4))
def test_sequences_that_come_and_go_at_any_time_change_no_other(model, seed):
    """Ended while their prompt is read, while they wait, while they run; three slots, of which none is ever known."""
    draw = random.Random(seed)
    make = lambda: StatePool(model, 3, chunk=5, rows=2)
    pool, heard = make(), {}
    for _ in range(60):
        if pool.free and draw.random() < 0.6:
            prompt = [draw.randrange(256) for _ in range(draw.randint(1, 17))]
            heard[pool.add(prompt)] = prompt, []
        if len(pool) and draw.random() < 0.2:
            pool.remove(draw.choice(list(pool._sequences)))
        for id, token in pool.step().items():
            heard[id][1].append(token)
        used = {sequence.slot for sequence in pool._sequences.values()}
        for slot in {0, 1, 2} - used:
            assert not any(x[:, slot].any() for x in pool.cache.values())
    assert len(heard) > 5
    for prompt, tokens in heard.values():
        alone, got = make(), []
        id = alone.add(prompt)
        while len(got) < len(tokens):
            got += alone.step().values()
        assert got == tokens
        alone.remove(id)


def test_what_a_slot_held_is_not_read_again(model):
    pool = StatePool(model, 1, chunk=4, rows=1)

    def answer(prompt):
        id, got = pool.add(prompt), []
        while len(got) < 3:
            got += pool.step().values()
        pool.remove(id)
        return got

    first = answer([1, 2, 3])
    answer([9] * 9)
    assert answer([1, 2, 3]) == first


def test_the_compiled_pool_has_two_graphs_and_the_same_tokens(model):
    from torch._dynamo.testing import CompileCounter

    requests, graphs = requests_of(5, 9, 4), CompileCounter()
    ours, theirs = (
        {i: x.argmax(-1).tolist() for i, x in serve(pool, requests, range(5)).items()}
        for pool in (StatePool(model, 3, chunk=4, rows=2), StatePool(model, 3, chunk=4, rows=2, compile=graphs))
    )
    assert ours == theirs
    assert graphs.frame_count == 2


def test_what_the_pool_refuses(model):
    pool = StatePool(model, 2)
    with pytest.raises(ValueError, match=r"prompt: expected a list of at least one token, got \[0\]"):
        pool.add([])
    with pytest.raises(ValueError, match=r"prompt: expected .* got \[2\] torch.float32"):
        pool.add([0.5, 1])
    with pytest.raises(ValueError, match=r"prompt: expected .* got \[1, 2\]"):
        pool.add([[1, 2]])
    for prompt in ("abc", None, [[1], [1, 2]]):
        with pytest.raises(ValueError, match="prompt: expected a list of tokens, got"):
            pool.add(prompt)
    with pytest.raises(ValueError, match=r"id \[1\]: cannot be a key"):
        pool.add([1], id=[1])
    with pytest.raises(ValueError, match="prompt: token 256 is outside the vocabulary of 256"):
        pool.add([1, 256])
    with pytest.raises(ValueError, match="prompt: token -1 is outside"):
        pool.add([-1, 3])
    assert pool.free == 2
    pool.add([1], id="mine")
    with pytest.raises(ValueError, match="id 'mine': already in the pool"):
        pool.add([1], id="mine")
    other = pool.add([1])
    with pytest.raises(ValueError, match="all 2 slots are in use: remove a sequence, or make a larger pool"):
        pool.add([1])
    pool.remove("mine")
    with pytest.raises(ValueError, match="id 'mine': not in the pool"):
        pool.remove("mine")
    with pytest.raises(ValueError, match="id 7: not in the pool"):
        pool.remove(7)
    assert pool.add([1], choose=lambda logits: 256) != other
    with pytest.raises(ValueError, match=r"id 1: choose gave 256, expected a token of \[0, 256\)"):
        pool.step()
    for name, value in (("slots", 0), ("chunk", 1.5), ("rows", True)):
        with pytest.raises(ValueError, match=f"StatePool: {name} must be an int of at least 1, got {value}"):
            StatePool(model, **{"slots": 1, name: value})


@pytest.mark.parametrize("step", [0, 1])
def test_one_sequence_that_fails_takes_nothing_from_the_others(model, step):
    """Its `choose` raises, while a prompt is read or after: it is out, the others have the tokens they get alone."""

    def fails(logits):
        nonlocal step
        step -= 1
        if step < 0:
            raise RuntimeError("no choice")
        return 7

    prompts, alone = [[5, 6], [1, 2, 3], [4, 5]], {}
    for i, prompt in enumerate(prompts):
        pool = StatePool(model, 3, chunk=8)
        pool.add(prompt, id=i)
        alone[i] = [pool.step()[i] for _ in range(4)]
    pool, got = StatePool(model, 3, chunk=8), {0: [], 2: []}
    pool.add(prompts[0], id=0)
    pool.add(prompts[1], id=1, choose=fails)
    pool.add(prompts[2], id=2)
    raised = 0
    while min(map(len, got.values())) < 4:
        try:
            tokens = pool.step()
        except RuntimeError:
            raised += 1
            assert (len(pool), pool.free) == (2, 1)
            continue
        tokens.pop(1, None)
        for i, token in tokens.items():
            got[i].append(token)
    assert raised == 1
    assert got == {i: alone[i] for i in got}


def test_logits_that_are_not_finite_are_named():
    model = loud("laplace-micro")
    model.model.norm.weight[3] = torch.nan
    with pytest.raises(BadInput, match=r"--ckpt: id 0: the model's logits are not finite: its weights are damaged"):
        list(laplace_generate.stream(model, [[1]], 3))


# Text.


def texts(model, prompts, count, **options):
    found = {i: [] for i in range(len(prompts))}
    for chosen in laplace_generate.stream(model, prompts, count, **options):
        for i, token in chosen.items():
            found[i].append(token)
    return list(found.values())


def test_text_is_a_function_of_the_seed(model):
    prompts = [[1, 2, 3], [4], [5] * 40]
    one, again, other = (texts(model, prompts, 12, seed=seed) for seed in (1, 1, 2))
    assert one == again != other
    assert [len(text) for text in one] == [12] * 3
    for prompt, text in zip(prompts, texts(model, prompts, 8, temperature=0), strict=True):
        logits = model(torch.tensor([prompt + text]))[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == text


def test_more_prompts_than_slots(model, monkeypatch):
    monkeypatch.setattr(laplace_generate, "SLOTS", 2)
    found = texts(model, [[i] for i in range(5)], 4, temperature=0)
    for i, text in enumerate(found):
        assert text == texts(model, [[i], [0]], 4, temperature=0)[0]


def test_states_that_do_not_fit_are_refused(model, monkeypatch):
    monkeypatch.setattr(laplace_generate, "state_bytes", lambda config, dtype: 1 << 60)
    with pytest.raises(BadInput, match=r"--prompt: 2 states take 2,147,483,648.0 GiB, here are"):
        laplace_generate.stream(model, [[1], [2]], 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, model):
    path = tmp_path_factory.mktemp("model")
    laplace_weights.save(path, model)
    return path


def run(folder, *options):
    return CliRunner().invoke(main, ["generate", "laplace", "--ckpt", str(folder), "--tokens", "6", *options])


def test_prompts_from_the_command_line(model, folder):
    said = run(folder, "--temperature", "0", "--prompt", "ab", "--prompt", "c")
    assert said.exit_code == 0, said.output
    want = []
    for tokens in texts(model, [[97, 98], [99]], 6, temperature=0):
        decode = Bytes().decoder()
        want.append("".join(map(decode, tokens)))
    assert said.stdout_bytes.decode() == f"ab{want[0]}\n\nc{want[1]}\n"
    said = run(folder)
    assert said.exit_code == 0, said.output
    assert said.stdout.endswith("\n")


def test_a_run_and_the_model_it_wrote_say_the_same(tmp_path):
    (tmp_path / "text.txt").write_text("to be or not to be, " * 200)
    options = ["--preset", "laplace-micro", "--data", tmp_path / "text.txt", "--steps", 2, "--seq", 16]
    said = CliRunner().invoke(main, ["train", "laplace", "--out", str(tmp_path / "run"), *map(str, options)])
    assert said.exit_code == 0, said.output
    one, other = run(tmp_path / "run", "--prompt", "to "), run(tmp_path / "run" / "model", "--prompt", "to ")
    assert one.exit_code == 0, one.output
    assert one.stdout_bytes == other.stdout_bytes
    assert one.stdout.startswith("to ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt", "a\udcff"], "--prompt 'a\\udcff': not UTF-8 text"),
        (["--temperature", "nan"], "--temperature nan: give a finite number of at least 0"),
        (["--tokenizer", "large.json"], "large.json: has 257 tokens, the model of"),
        (["--ckpt", "."], "--ckpt .: neither a run (run.json) nor a model (config.json)"),
        (["--ckpt", "none"], "--ckpt none: No such file or directory"),
    ],
)
def test_bad_options_are_named(folder, tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    Tokenizer(models.WordLevel({str(i): i for i in range(257)}, unk_token="0")).save("large.json")
    said = run(folder, *options)
    assert said.exit_code == 1
    assert said.stderr.startswith("Error: --")
    assert message in said.stderr
    assert said.stderr.count("\n") == 1
    assert said.stdout == ""


def test_a_tiny_temperature_chooses_the_likeliest(model):
    likeliest = texts(model, [[7]], 5, temperature=0)
    assert texts(model, [[7]], 5, temperature=1e-30) == likeliest
    assert texts(model, [[7]], 5, temperature=5.0, top_k=1) == likeliest


def test_bench_decode_says_what_was_measured():
    options = ["--preset", "laplace-micro", "--prompt", "4", "--prompt", "9", "--tokens", "3", "--rows", "2", "--json"]
    said = CliRunner().invoke(main, ["bench", "decode", *options])
    assert said.exit_code == 0, said.output
    rows = [json.loads(text) for text in said.stdout.splitlines()]
    assert [row["prompt"] for row in rows] == [4, 9]
    assert rows[0]["ratio"] == 1 < rows[1]["ratio"] * 100
    assert {row["state_bytes"] for row in rows} == {state_bytes(PRESETS["laplace-micro"], torch.float32)}
    said = CliRunner().invoke(main, ["bench", "decode", "--preset", "llama-tiny"])
    assert said.exit_code == 2
    assert "--preset llama-tiny: expected laplace-tiny or" in said.stderr
