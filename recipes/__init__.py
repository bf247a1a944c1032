"""Configurations of real runs, one short file each: `ringtide train --recipe NAME` runs one on its machines, `ringtide
plan --recipe NAME` prices it anywhere, and `ringtide train --recipe NAME --scale-down` rehearses it on a laptop."""

import tomllib
from dataclasses import dataclass, field, replace
from importlib.resources import files

NAMES = sorted(file.name.removesuffix(".toml") for file in files(__name__).iterdir() if file.name.endswith(".toml"))
_DEVICES = 8  # that a rehearsal simulates
_TOKENS = 64  # of a rehearsal, a device


@dataclass(frozen=True)
class Recipe:
    name: str
    model: str  # a preset of models.llama or models.laplace
    chip: str
    topology: str | None = None  # of a TPU pod
    instances: int | None = None  # trn2.48xlarge, 16 chips each
    mesh: dict[str, int] = field(default_factory=dict)  # the axes that are larger than 1
    train: dict = field(default_factory=dict)  # options of `ringtide train llama` or `ringtide train laplace`
    serve: dict = field(default_factory=dict)  # arguments of bench.serve; sequences: how many at once, over all ranks

    @property
    def family(self) -> str:
        """The command of `ringtide train` that it is for."""
        return "laplace" if self.model.startswith("laplace") else "llama"

    @property
    def finetune(self) -> bool:
        """Starts from weights that the user has to name."""
        return self.name.endswith("-finetune")

    def scaled_down(self) -> "Recipe":
        """The same axes, strategy, remat and dtype, with a tiny model, few tokens and at most 8 devices."""
        mesh = dict.fromkeys(self.mesh, 2)
        if self.family == "llama":
            last = list(mesh)[-1]
            mesh[last] = min(self.mesh[last], _DEVICES // 2 ** (len(mesh) - 1))
        shards = mesh.get("ulysses", 1) * mesh.get("context", 1)
        small = {"seq": _TOKENS * shards, "batch": mesh.get("data", 1) * mesh.get("fsdp", 1), "steps": 3, "warmup": 1}
        train = {**self.train, **small, "val_windows": 1, "lr": 1e-3} if self.train else {}
        few = {"sequences": _DEVICES, "prompt": _TOKENS, "tokens": _TOKENS // 2, "chunk": _TOKENS // 4}
        serve = {**self.serve, **few} if self.serve else {}
        return replace(self, model=f"{self.family}-micro", mesh=mesh, train=train, serve=serve)

    def planned(self) -> dict:
        """What `ringtide plan` takes of it, by its options; what it does not say is not there."""
        mesh = ",".join(f"{axis}={size}" for axis, size in self.mesh.items())
        known = {"preset": self.model, "chip": self.chip, "topology": self.topology, "instances": self.instances}
        known |= {"tokens": str(self.train["seq"]), "batch": self.train["batch"]} if self.train else {}
        known |= {"mesh": mesh or None, "remat": self.train.get("remat"), "sequences": self.serve.get("sequences")}
        strategy = self.train.get("strategy")
        return known | {"strategy": (strategy,) if strategy else ()}


def load(name: str) -> Recipe:
    """The recipe of that name. Raises KeyError."""
    if name not in NAMES:
        raise KeyError(name)
    return Recipe(name, **tomllib.loads((files(__name__) / f"{name}.toml").read_text()))
