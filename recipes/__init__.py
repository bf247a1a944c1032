"""Configurations of real runs, one short file each: `ringtide train --recipe NAME` runs one on its pod, `ringtide plan
--recipe NAME` prices it anywhere, and `ringtide train --recipe NAME --scale-down` rehearses it on a laptop."""

import tomllib
from dataclasses import dataclass
from importlib.resources import files

NAMES = sorted(file.name.removesuffix(".toml") for file in files(__name__).iterdir() if file.name.endswith(".toml"))
_DEVICES = 8  # that a rehearsal simulates
_TOKENS = 64  # of a rehearsal, a device


@dataclass(frozen=True)
class Recipe:
    name: str
    model: str  # a preset of models.llama
    chip: str
    topology: str
    mesh: dict[str, int]  # the axes of models.sharding that are larger than 1
    train: dict  # options of `ringtide train llama`

    @property
    def finetune(self) -> bool:
        """Starts from weights that the user has to name."""
        return self.name.endswith("-finetune")

    def scaled_down(self) -> "Recipe":
        """The same axes, strategy, remat and dtype, with a tiny model, few tokens and at most 8 devices."""
        mesh = dict.fromkeys(self.mesh, 2)
        last = list(mesh)[-1]
        mesh[last] = min(self.mesh[last], _DEVICES // 2 ** (len(mesh) - 1))
        shards = mesh.get("ulysses", 1) * mesh.get("context", 1)
        small = {"seq": _TOKENS * shards, "batch": mesh.get("data", 1) * mesh.get("fsdp", 1), "steps": 3, "warmup": 1}
        train = {**self.train, **small, "val_windows": 1, "lr": 1e-3}
        return Recipe(self.name, "llama-micro", self.chip, self.topology, mesh, train)


def load(name: str) -> Recipe:
    """The recipe of that name. Raises KeyError."""
    if name not in NAMES:
        raise KeyError(name)
    return Recipe(name, **tomllib.loads((files(__name__) / f"{name}.toml").read_text()))
