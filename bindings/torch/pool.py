"""Continuous batching: sequences of any length come and go, each in a slot of one pool of states.

    add -> waiting: [ chunk of the prompt | chunk | last chunk ] -> running: one token a step ... -> remove

A step takes a chunk of up to `rows` waiting prompts, the oldest first, and one token of every running sequence. Both
parts have the same shapes in every step: [rows, chunk] tokens, of which some are padding, and [slots] tokens, of which
some are dead. A prompt is cut from its own beginning. So the logits of a sequence depend on its tokens alone: not on
what else is in the pool, nor on its slot, nor on when it came. Bit for bit, where a row of a matrix product does not
depend on its place: tried for a CPU, PyTorch 2.13, up to 8 threads and widths that are multiples of 16 (at 12 threads
it does for some). Elsewhere to rounding.

A slot is zeroed when its sequence is removed: the next one begins from nothing, and what was read is not kept.
"""

from collections import deque
from dataclasses import dataclass

import torch


@dataclass
class _Sequence:
    slot: int
    rest: torch.Tensor  # of the prompt, int64
    token: int | None  # the last one, once the prompt has been read
    choose: object


class StatePool:
    """A model and the states of up to `slots` sequences, whose memory never grows.

    model: a LaplaceForCausalLM, or another with its new_cache, decode_ and forward(cache=...).
    slots: how many sequences at once.  chunk: tokens of a prompt that a step reads.  rows: of how many prompts.
    compile: a backend of torch.compile, for the model's two steps; None: not compiled.

    `add` and `remove` raise ValueError, one line, for what cannot be, and leave the pool as it was.
    """

    def __init__(self, model, slots: int, *, chunk: int = 128, rows: int = 4, compile=None):
        for name, value in (("slots", slots), ("chunk", chunk), ("rows", rows)):
            if type(value) is not int or value < 1:
                raise ValueError(f"StatePool: {name} must be an int of at least 1, got {value!r}")
        self.model, self.slots, self.chunk, self.rows = model, slots, chunk, rows
        self.cache = model.new_cache(slots)
        self.device = self.cache["state"].device
        self._read, self._decode = model.forward, model.decode_
        if compile is not None:
            options = {"backend": compile, "fullgraph": True, "dynamic": False}
            self._read, self._decode = (torch.compile(f, **options) for f in (self._read, self._decode))
        self._free = deque(range(slots))
        self._sequences = {}
        self._waiting = deque()  # ids whose prompt has not been read to its end
        self._next = 0
        self._held = {}  # the tokens of a step that raised

    def __len__(self):
        """How many sequences are in the pool."""
        return len(self._sequences)

    @property
    def free(self) -> int:
        """How many more may be added."""
        return len(self._free)

    @property
    def nbytes(self) -> int:
        """Of all states: what they take from the first step to the last."""
        return sum(x.nbytes for x in self.cache.values())

    def add(self, prompt, *, id=None, choose=None):
        """Takes a sequence in and returns its id.

        prompt: at least one token.  id: what `step` and `remove` shall call it; None: an int that was not used before.
        choose: float32 logits [vocabulary] on the CPU -> the next token; None: the likeliest.
        """
        vocabulary = self.model.config.vocab_size
        try:
            prompt = torch.as_tensor(prompt)
        except (TypeError, ValueError, RuntimeError):
            raise ValueError(f"prompt: expected a list of tokens, got {prompt!r:.80}") from None
        if prompt.ndim != 1 or not len(prompt) or prompt.is_floating_point() or prompt.dtype == torch.bool:
            raise ValueError(f"prompt: expected a list of at least one token, got {list(prompt.shape)} {prompt.dtype}")
        if (low := int(prompt.min())) < 0 or (high := int(prompt.max())) >= vocabulary:
            raise ValueError(f"prompt: token {low if low < 0 else high} is outside the vocabulary of {vocabulary}")
        if type(id).__hash__ is None:
            raise ValueError(f"id {id!r}: cannot be a key: take a number, a text or a tuple of these")
        if id is not None and id in self._sequences:
            raise ValueError(f"id {id!r}: already in the pool: remove it first, or choose another id")
        if not self._free:
            raise ValueError(f"StatePool: all {self.slots} slots are in use: remove a sequence, or make a larger pool")
        if id is None:
            while self._next in self._sequences:
                self._next += 1
            id, self._next = self._next, self._next + 1
        self._sequences[id] = _Sequence(self._free.popleft(), prompt.long().cpu(), None, choose)
        self._waiting.append(id)
        return id

    def remove(self, id) -> None:
        """Ends a sequence, at any time, and frees its slot."""
        if id not in self._sequences:
            raise ValueError(f"id {id!r}: not in the pool: it was never added, or it was removed before")
        slot = self._sequences.pop(id).slot
        if id in self._waiting:
            self._waiting.remove(id)
        for x in self.cache.values():
            x[:, slot] = 0
        self._free.append(slot)
        self._held.pop(id, None)

    @torch.no_grad()
    def step(self) -> dict:
        """{id: its next token} of every sequence that has one now: not of those whose prompt goes on.

        A sequence that cannot go on, whose logits are not finite or whose `choose` gives no token or raises, is removed
        and the step raises that error, ValueError of the pool's own; the tokens that the others were given are what the
        next call returns.
        """
        if self._held:
            held, self._held = self._held, {}
            return held
        running = [id for id, sequence in self._sequences.items() if sequence.token is not None]
        reading = [self._waiting[i] for i in range(min(self.rows, len(self._waiting)))]
        chosen, failed = {}, {}
        if running:
            self._run(running, chosen, failed)
        if reading:
            self._prefill(reading, chosen, failed)
        for id in failed:
            self.remove(id)
        if failed:
            self._held = chosen
            raise next(iter(failed.values()))
        return chosen

    def _run(self, ids, chosen, failed):
        tokens, alive = torch.zeros(self.slots, dtype=torch.long), torch.zeros(self.slots, dtype=torch.bool)
        slots = [self._sequences[id].slot for id in ids]
        tokens[slots] = torch.tensor([self._sequences[id].token for id in ids])
        alive[slots] = True
        logits = self._decode(tokens.to(self.device), self.cache, alive.to(self.device))
        self._choose(ids, logits, slots, chosen, failed)

    def _prefill(self, ids, chosen, failed):
        tokens = torch.zeros(self.rows, self.chunk, dtype=torch.long)
        segments = torch.full_like(tokens, -1)
        slots = torch.zeros(self.rows, dtype=torch.long)
        for row, id in enumerate(ids):
            sequence = self._sequences[id]
            part, sequence.rest = sequence.rest[: self.chunk], sequence.rest[self.chunk :]
            tokens[row, : len(part)], segments[row, : len(part)], slots[row] = part, 0, sequence.slot
        slots = slots.to(self.device)
        old = {name: x[:, slots] for name, x in self.cache.items()}
        logits, new = self._read(tokens.to(self.device), segment_ids=segments.to(self.device), cache=old)
        for name, x in self.cache.items():
            x.index_copy_(1, slots[: len(ids)], new[name][:, : len(ids)])
        done = [row for row, id in enumerate(ids) if not len(self._sequences[id].rest)]
        for row in done:
            self._waiting.remove(ids[row])
        self._choose([ids[row] for row in done], logits, done, chosen, failed)

    def _choose(self, ids, logits, rows, chosen, failed):
        """Adds {id: token} to chosen, by the rows of the logits [rows, vocabulary], or {id: error} to failed."""
        best, finite = torch.stack((logits.argmax(-1), logits.isfinite().all(-1).long())).tolist()
        for id, row in zip(ids, rows, strict=True):
            sequence = self._sequences[id]
            try:
                if not finite[row]:
                    raise ValueError(f"id {id!r}: the model's logits are not finite: its weights are damaged")
                token = best[row] if sequence.choose is None else int(sequence.choose(logits[row].cpu()))
                if not 0 <= token < logits.shape[1]:
                    raise ValueError(f"id {id!r}: choose gave {token}, expected a token of [0, {logits.shape[1]})")
            except Exception as error:  # of the caller's function, too: the other rows have moved on already
                failed[id] = error
            else:
                sequence.token = chosen[id] = token
