"""The `ringtide` command: one small file a command, imported only when that command is called."""

from importlib import import_module

import click

_COMMANDS = {
    "doctor": "what is installed, which backends can run here, and why others cannot",
    "fuzz": "test an implementation against the float64 reference",
    "train": "train a model",
    "generate": "stream text from a trained model",
    "bench": "measure speed and memory",
    "simulate": "run a Trainium2 kernel on this CPU, and estimate its time there",
    "plan": "whether a training run fits a pod, and what it will take",
}


class _LazyGroup(click.Group):
    def list_commands(self, ctx):
        return list(_COMMANDS)

    def get_command(self, ctx, name):
        if name not in _COMMANDS:
            return None
        return import_module(f"ringtide.cli.{name}").command

    def format_commands(self, ctx, formatter):  # without importing the commands
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.command(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="ringtide")
def main():
    """Long-context kernels for TPU, Trainium and GPU, held to a float64 truth."""
