"""The needle probe: what is asked, how far away it was said, and that a model is needed to answer."""

import json
import re

import numpy as np
import pytest
from click.testing import CliRunner

from ringtide.bench import recall
from ringtide.cli.bench import command

TEXT = [b"line %d\n" % i for i in range(50)]


@pytest.mark.parametrize("distance", [8, 16, 100, 1000])
def test_a_question_is_asked_at_its_distance_about_one_definition(distance):
    asked, answers = recall.questions(TEXT, distance, 5)
    assert asked.shape == (5, 128 + distance + recall.DIGITS)
    for row, answer in zip(asked, answers, strict=True):
        text = bytes(row)
        key, value = re.search(rb"#(\w\w)\?(\d{4})$", text).groups()
        said = list(re.finditer(rb"#%s=(\d{4})\n" % key, text))
        assert [match[1] for match in said] == [value]
        assert bytes(answer) == value
        assert len(text) - recall.DIGITS - (said[0].end() - 1) - 1 == distance


def test_a_corpus_asks_only_what_it_said_before():
    text = recall.corpus(TEXT, 50_000, seed=1)
    assert len(text) >= 50_000
    said, distances = {}, []
    for match in re.finditer(rb"#(\w\w)([=?])(\d{4})\n", text):
        key, kind, value = match.groups()
        if kind == b"=":
            said.setdefault((key, value), match.end())
        else:
            distances.append(match.start() - said[key, value])
    assert len(distances) > 500
    assert max(distances) < 1.5 * recall.FARTHEST
    assert text == recall.corpus(TEXT, 50_000, seed=1) != recall.corpus(TEXT, 50_000, seed=2)


def test_who_remembers_is_right_and_who_guesses_is_not():
    def remembers(tokens):
        rows = []
        for row in tokens.astype(np.uint8):
            key = re.search(rb"#(\w\w)\?\d{4}$", bytes(row))[1]
            rows.append(list(re.search(rb"#%s=(\d{4})\n" % key, bytes(row))[1]))
        return np.array(rows)

    rows = list(recall.probe(remembers, TEXT, [16, 300], count=20))
    assert [(row["distance"], row["recalled"], row["digits"]) for row in rows] == [(16, 1, 1), (300, 1, 1)]
    (row,) = recall.probe(lambda tokens: np.full((len(tokens), 4), ord("7")), TEXT, [64], count=20)
    assert row["recalled"] == 0
    assert 0 < row["digits"] < 0.4


@pytest.mark.parametrize(
    ("args", "words"),
    [((), "give one of the two"), (("--run", ".", "--distances", "7"), "expected bytes from 8"),
     (("--run", ".", "--plot", "x.txt"), "expected a .png")],
)  # fmt: skip
def test_bad_input_is_one_line(args, words):
    done = CliRunner().invoke(command, ["recall", *args])
    assert done.exit_code == 2
    assert words in done.output


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "neither a run"), ({"run.json": "{"}, "not JSON"), ({"config.json": "[]"}, "expected a JSON object"),
     ({"config.json": "{}"}, "config.json")],
)  # fmt: skip
def test_a_folder_that_holds_no_model_is_one_line(tmp_path, content, words):
    for name, text in (content or {}).items():
        (tmp_path / name).write_text(text)
    done = CliRunner().invoke(command, ["recall", "--run", str(tmp_path)])
    assert (done.exit_code, done.output.count("\n")) == (1, 1)
    assert words in done.output


def test_a_corpus_that_cannot_be_written_is_one_line(tmp_path):
    done = CliRunner().invoke(command, ["recall", "--megabytes", "1", "--corpus", str(tmp_path / "none" / "x")])
    assert (done.exit_code, done.output.count("\n")) == (1, 1)
    assert "No such file" in done.output


def test_models_of_both_kinds_are_asked(tmp_path):
    pytest.importorskip("torch")
    from ringtide.models import laplace, laplace_weights, llama, weights

    model = laplace.init_weights(laplace.LaplaceForCausalLM(laplace.PRESETS["laplace-micro"]), 0)
    laplace_weights.save(tmp_path / "laplace", model)
    config = llama.PRESETS["llama-micro"]
    weights.save(tmp_path / "llama", llama.init(0, config), config)
    plot = tmp_path / "recall.png"
    args = ["--run", tmp_path / "laplace", "--run", tmp_path / "llama", "--distances", "16,64", "--count", "3"]
    done = CliRunner().invoke(command, ["recall", *map(str, args), "--json", "--plot", str(plot)])
    assert done.exit_code == 0, done.output
    rows = [json.loads(row) for row in done.stdout.splitlines()]
    assert [(row["model"], row["distance"]) for row in rows] == [
        ("Laplace", 16),
        ("Laplace", 64),
        ("Llama", 16),
        ("Llama", 64),
    ]
    assert plot.stat().st_size > 1000
