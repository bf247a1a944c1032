"""The vocabulary of bytes as files that Hugging Face's tokenizers read: a server that takes text needs them.

python -m ringtide.models.byte_tokenizer FOLDER
"""

import json
import sys
from pathlib import Path

from ringtide.models import BadInput, line


def save(folder) -> None:
    """Writes tokenizer.json and tokenizer_config.json: token i is byte i, and 0 ends a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    # Their name of a byte: its Latin-1 character if that can be seen, else the next one from 256 on.
    seen = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = iter(range(256, 512))
    names = {chr(i if i in seen else next(hidden)): i for i in range(256)}
    tokenizer = Tokenizer(models.BPE(names, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    end = next(iter(names))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "clean_up_tokenization_spaces": False}
    try:
        tokenizer.save(str(Path(folder) / "tokenizer.json"))
        (Path(folder) / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    except Exception as error:  # the library raises no narrower one
        raise BadInput(f"{folder}: {line(error)}") from None


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m ringtide.models.byte_tokenizer FOLDER")
    try:
        save(sys.argv[1])
    except BadInput as error:
        sys.exit(str(error))
