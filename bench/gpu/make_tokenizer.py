#!/usr/bin/env python3
"""A tokenizer for the dummy model, so that clients which need text work: token i is the word `wi`.

python3 bench/gpu/make_tokenizer.py FOLDER [VOCABULARY]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers


def main() -> None:
    """Write tokenizer.json and tokenizer_config.json into the model's folder."""
    folder, size = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 32000
    words = {f"w{index}": index for index in range(size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w2"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 200000}
    config |= {"bos_token": "w0", "eos_token": "w1", "unk_token": "w2", "pad_token": "w0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    main()
