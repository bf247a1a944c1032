"""Generation: what cannot be generated from is named in one line; prompts of different lengths share a compilation."""

import numpy as np
import pytest
from click.testing import CliRunner
from tokenizers import Tokenizer, models

from ringtide.cli import main
from ringtide.models import BadInput, generate, llama, vocabulary, weights

CONFIG = llama.PRESETS["llama-micro"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a model of bytes."""
    folder = tmp_path_factory.mktemp("model")
    weights.save(folder, llama.init(0, CONFIG), CONFIG)
    return folder


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt", "a\udcff"], "--prompt 'a\\udcff': not UTF-8 text"),
        (["--temperature", "nan"], "--temperature nan: give a finite number of at least 0"),
        (["--temperature", "inf"], "--temperature inf: give a finite number of at least 0"),
        (
            ["--tokens", "1000000000000"],
            "--tokens 1000000000000: 1,099,511,627,776 slots of keys and values, 262,144.0 GiB;",
        ),
        (["--tokenizer", "large.json"], "large.json: has 257 tokens, the model of"),
    ],
)
def test_bad_options_are_named(model, tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    Tokenizer(models.WordLevel({str(i): i for i in range(257)}, unk_token="0")).save("large.json")
    said = CliRunner().invoke(main, ["generate", "llama", "--ckpt", str(model), *options])
    assert said.exit_code == 1
    assert said.stderr.startswith("Error: --")
    assert message in said.stderr
    assert said.stderr.count("\n") == 1
    assert said.stdout == ""


@pytest.mark.parametrize("name", ["none", "x" * 256])
def test_folders_that_cannot_be_are_named(tmp_path, name):
    with pytest.raises(BadInput, match=r"^--ckpt .*: (No such file or directory|File name too long)$"):
        generate.load(tmp_path / name)


def test_a_prompt_that_is_no_text_is_named_with_a_tokenizer_too(tmp_path):
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "t.json"))
    with pytest.raises(BadInput, match="not UTF-8 text"):
        vocabulary.Tokens(tmp_path / "t.json").encode("\udcff")


def test_logits_that_are_not_finite_are_named():
    params = llama.init(0, CONFIG)
    params["norm"][3] = np.nan
    with pytest.raises(BadInput, match="logits are not finite"):
        next(generate.stream(params, CONFIG, [1], 12))


@pytest.mark.filterwarnings("error")
def test_a_tiny_temperature_draws_the_likeliest():
    assert vocabulary.draw(np.array([0.0, 2.0, 1.0]), 1e-320, 0, np.random.default_rng(0)) == 1


def test_prompts_share_the_compiled_step():
    params = llama.init(0, CONFIG)
    tokens = lambda prompt: list(generate.stream(params, CONFIG, prompt, 12, temperature=0))
    tokens([5])
    before = llama.extend._cache_size()
    after = tokens([1, 2, 3])
    assert llama.extend._cache_size() == before + 1  # for the prompt; not for a single token
    h = llama.hidden(params, np.array([[1, 2, 3, *after]]), np.arange(15), CONFIG)
    np.testing.assert_array_equal(after, llama.logits(params, h)[0, 2:-1].argmax(-1))
