"""`ringtide generate`."""

from contextlib import contextmanager
from pathlib import Path

import click


@click.group("generate")
def command():
    """Stream text from a trained model."""


_PATH = click.Path(path_type=Path)


def _options(*options):
    """Those that all models have, and the further ones of one."""
    common = [
        click.option("--ckpt", type=_PATH, required=True, help="folder of a run, or of a model"),
        *options,
        click.option("--tokens", type=click.IntRange(min=1), default=256, show_default=True, help="how many at most"),
        click.option(
            "--temperature", type=click.FloatRange(min=0), default=0.8, show_default=True, help="0: the likeliest"
        ),
        click.option("--top-k", type=click.IntRange(min=0), default=40, show_default=True, help="0: from all tokens"),
        click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True),
        click.option("--tokenizer", type=_PATH, help="tokenizer.json [the one in --ckpt, or bytes]"),
    ]

    def wrap(function):
        for option in reversed(common):
            function = option(function)
        return function

    return wrap


@command.command()
@_options(click.option("--prompt", default="", help="what the text begins with [nothing]"))
def llama(ckpt, prompt, tokens, temperature, top_k, seed, tokenizer):
    """Stream text from a Llama; --ckpt also takes Hugging Face's format."""
    with _refusals("models"):
        from ringtide.models import generate

        params, config, vocabulary = generate.load(ckpt, tokenizer, _say)
        ids = vocabulary.encode(prompt)
        text = vocabulary.decoder()
        stream = generate.stream(params, config, ids, tokens, temperature, top_k, seed)
        click.echo(prompt, nl=False)
        for token in stream:
            click.echo(text(token), nl=False)
    click.echo()


@command.command()
@_options(click.option("--prompt", "prompts", multiple=True, help="what the text begins with; repeat for more texts"))
def laplace(ckpt, prompts, tokens, temperature, top_k, seed, tokenizer):
    """Stream text from a Laplace; --ckpt also takes fla's format. Several prompts are generated from at once: the first
    is shown as it comes, the others below it.
    """
    with _refusals("models,torch"):
        from ringtide.models import laplace_generate

        prompts = prompts or ("",)
        model, vocabulary = laplace_generate.load(ckpt, tokenizer, _say)
        ids = [vocabulary.encode(prompt) for prompt in prompts]
        texts = [vocabulary.decoder() for _ in prompts]
        stream = laplace_generate.stream(model, ids, tokens, temperature, top_k, seed)
        later = [[prompt] for prompt in prompts]
        click.echo(prompts[0], nl=False)
        for chosen in stream:
            for i, token in chosen.items():
                if i == 0:
                    click.echo(texts[0](token), nl=False)
                else:
                    later[i].append(texts[i](token))
        for parts in later[1:]:
            click.echo("\n\n" + "".join(parts), nl=False)
    click.echo()


@contextmanager
def _refusals(extras):
    """What cannot be, in one line."""
    try:
        from ringtide.models import BadInput

        yield
    except ModuleNotFoundError as error:
        raise click.ClickException(f"{error.name} is not installed: pip install 'ringtide[{extras}]'") from None
    except BadInput as error:
        raise click.ClickException(str(error)) from None


def _say(line):
    click.echo(line, err=True)
