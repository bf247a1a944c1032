"""`ringtide generate`."""

from pathlib import Path

import click


@click.group("generate")
def command():
    """Stream text from a trained model."""


_PATH = click.Path(path_type=Path)


@command.command()
@click.option("--ckpt", type=_PATH, required=True, help="folder of a run, or of a model in Hugging Face's format")
@click.option("--prompt", default="", help="what the text begins with [nothing]")
@click.option("--tokens", type=click.IntRange(min=1), default=256, show_default=True, help="how many at most")
@click.option("--temperature", type=click.FloatRange(min=0), default=0.8, show_default=True, help="0: the likeliest")
@click.option("--top-k", type=click.IntRange(min=0), default=40, show_default=True, help="0: from all tokens")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--tokenizer", type=_PATH, help="tokenizer.json [the one in --ckpt, or bytes]")
def llama(ckpt, prompt, tokens, temperature, top_k, seed, tokenizer):
    """Stream text from a Llama."""
    try:
        from ringtide.models import BadInput, generate
    except ModuleNotFoundError as error:
        raise click.ClickException(f"{error.name} is not installed: pip install 'ringtide[models]'") from None
    try:
        params, config, vocabulary = generate.load(ckpt, tokenizer, lambda line: click.echo(line, err=True))
        ids = vocabulary.encode(prompt)
        text = vocabulary.decoder()
        stream = generate.stream(params, config, ids, tokens, temperature, top_k, seed)
        click.echo(prompt, nl=False)
        for token in stream:
            click.echo(text(token), nl=False)
    except BadInput as error:
        raise click.ClickException(str(error)) from None
    click.echo()
