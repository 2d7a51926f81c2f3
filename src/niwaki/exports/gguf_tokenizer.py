"""The tokenizer of a model as GGUF files have it: what transformers does with text has to be what llama.cpp does.

Judged is the tokenizer that transformers has loaded, not its files: its classes replace some of what these say. Each
step, with all that changes tokens, is one that llama.cpp has a name for, or the tokenizer is refused.
"""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from niwaki.checkpoints.tensors import read_json
from niwaki.errors import CheckpointError, UnsupportedModelError
from niwaki.models.gguf import CONTROL, SPACE, SPLITTINGS, USER
from niwaki.models.tokens import load_tokenizer
from niwaki.records.wording import several

#: llama.cpp's names for ways of splitting that have been tried there with what is exported. It knows more.
_SPLITTINGS = (
    *("gpt-2", "smollm", "qwen2", "deepseek-r1-qwen", "qwen35", "llama-bpe", "smaug-bpe", "tekken", "gpt-4o"),
    *("seed-coder", "deepseek-coder", "deepseek-v3"),
)
#: What changes no tokens of a step.
_HARMLESS = {"trim_offsets"}
#: Values of the model of merges, of which llama.cpp has no others. Unknown characters are none: all have their bytes.
_MERGING: dict[str, tuple[Any, ...]] = {
    "type": ("BPE",),
    "dropout": (None, 0.0),
    "continuing_subword_prefix": (None, ""),
    "end_of_word_suffix": (None, ""),
}
#: In names of tokens of DeepSeek.
_BAR = "\N{FULLWIDTH VERTICAL LINE}"
#: Tokens of these names end texts in llama.cpp, whatever their kind.
_ENDS = {
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>", "_<EOT>"),
    *("[EOT]", "[EOS]", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<|return|>", "<|call|>"),
    *("<|flush|>", "<|calls|>", "</s>", "<|eom_id|>", "[e~[", f"<{_BAR}end▁of▁sentence{_BAR}>"),
    *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>"),
    *("<REPO>", "<reponame>", "<|file_sep|>"),
}
#: Ordinary tokens of these names end texts in llama.cpp, or are special.
_TAKEN = _ENDS | {
    *("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"),
    *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<PRE>", "▁<PRE>", "<|code_prefix|>", "<|prefix|>"),
    *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<SUF>", "▁<SUF>", "<|code_suffix|>", "<|suffix|>"),
    *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<MID>", "▁<MID>", "<|code_middle|>", "<|middle|>"),
    *(f"<{_BAR}fim▁{name}{_BAR}>" for name in ("begin", "hole", "end")),
}
#: What stands beside a token in texts that are tried.
_BESIDE = ("", " ", "\n", "a", "S", "1", "<", ">", "/", "|", "[", "]", "_", ".", "é", "東")
#: Kinds of tokens.
_NORMAL, _UNUSED, _BYTE = 1, 5, 6
#: Steps of tokenizers of SentencePiece's kind, and whether they put a space before a text: always, or where none is.
_SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
_NO_SPLIT = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
_METASPACE = {"type": "Metaspace", "replacement": SPACE, "split": False}
_PREFIXES: list[tuple[list[dict[str, Any]], list[dict[str, Any]], bool, str]] = [
    ([{"type": "Prepend", "prepend": SPACE}, _SPACES], [], True, ""),
    ([_SPACES], [], False, ""),
    ([_SPACES], [_NO_SPLIT], False, ""),  # after which there is no space to split at
    ([], [{**_METASPACE, "prepend_scheme": "never"}], False, ""),
    ([], [{**_METASPACE, "prepend_scheme": "first"}], True, "only before a text that begins with none"),
    ([], [{**_METASPACE, "prepend_scheme": "always"}], True, "only where there is none"),
]
_FALLING_BACK = {"Replace", "ByteFallback", "Fuse", "Strip"}
#: If a model is named so, llama.cpp takes spaces away behind its special tokens but for some; it needs all of these.
_STRIPPING = ("phi-3", "phi3")
_UNSTRIPPED = {"<unk>", "<s>", "<|endoftext|>"}
#: Ways of splitting whose expressions know no marks in llama.cpp, and A to Z alone as capitals.
_CASED = ("tekken", "gpt-4o")
#: Expressions that match all of a text.
_WHOLE = {each.expressions[0] for each in SPLITTINGS.values() if len(each.expressions) == 1}


class Tokenizer:
    """The tokenizer of a model of ``size`` words, checked; ``notes`` is what llama.cpp does otherwise to few texts.

    UnsupportedModelError for what llama.cpp does otherwise or niwaki does not know; CheckpointError where it has other
    tokens than the model, or there is none.
    """

    def __init__(self, path: Path, size: int, config_end: Any = None) -> None:
        self.path, self.size, self.notes = path, size, list[str]()
        if (
            not any((path / name).exists() for name in ("tokenizer.json", "vocab.json"))
            and (path / "tokenizer.model").exists()
        ):
            raise self._unsupported(
                "is tokenizer.model alone, of SentencePiece", "niwaki reads tokenizer.json, which transformers saves"
            )
        self._tokenizer = load_tokenizer(path)
        self._backend: Any = getattr(self._tokenizer, "backend_tokenizer", None)
        if self._backend is None or not hasattr(self._backend, "to_str"):
            raise self._unsupported(f"is a {type(self._tokenizer).__name__}", "niwaki takes those of tokenizers alone")
        if self._tokenizer.split_special_tokens:
            raise self._unsupported("has split_special_tokens True", "llama.cpp looks for special tokens in texts")
        self._content: dict[str, Any] = json.loads(self._backend.to_str())
        self._model: dict[str, Any] = self._content["model"]
        self._added: list[dict[str, Any]] = self._content["added_tokens"]
        self._changes = _steps(self._content["normalizer"], "normalizers")
        self._splits = _steps(self._content["pre_tokenizer"], "pretokenizers")
        #: Whether unknown characters become tokens of their bytes, as with SentencePiece: llama.cpp merges by scores.
        self._falls_back = bool(self._model.get("byte_fallback"))
        self._check_merges()
        self._check_alphabet()
        self._check_added()
        self._check_names()
        self._check_overlaps()
        self._prefix = self._falls_back and self._find_prefix()
        self._splitter = "default" if self._falls_back else self._find_splitter()
        self.tokens, self.kinds = self._list_tokens()
        self._scores = self._find_scores() if self._falls_back else []
        self._start, self._end = self._find_ends()
        self._stops = self._find_stops(config_end)

    @property
    def file_size(self) -> int:
        """How many bytes of a file it takes, within a few hundred: strings with their lengths, kinds and scores."""
        template = self._tokenizer.chat_template or ""
        templates = template.values() if isinstance(template, dict) else [template]
        texts = (*self.tokens, *([] if self._falls_back else self._merges), *templates)
        return 4 * (len(self.kinds) + len(self._scores)) + sum(8 + len(text.encode()) for text in texts)

    def name(self, model: str) -> str:
        """What a file may say that the ``model`` is named: llama.cpp concludes from it what special tokens do."""
        if any(each in model.lower() for each in _STRIPPING) == self._strips and "modern-bert" not in model.lower():
            return model
        return f"{model} ({_STRIPPING[0]})" if self._strips else ""

    def write(self, writer: Any) -> None:
        """Adds it to a ``GGUFWriter``."""
        tokenizer = self._tokenizer
        writer.add_tokenizer_model("llama" if self._falls_back else "gpt2")
        writer.add_tokenizer_pre(self._splitter)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.kinds)
        if self._falls_back:
            writer.add_token_scores(self._scores)
            writer.add_add_space_prefix(self._prefix)
        else:
            writer.add_token_merges(self._merges)
        numbers = {name: getattr(tokenizer, f"{name}_token_id") for name in ("bos", "unk", "pad", "sep", "mask")}
        if self._start is not None:
            numbers["bos"] = self._start
        numbers |= dict(zip(("eos", "eot", "eom"), self._stops, strict=False))
        for name, number in numbers.items():
            if number is not None and number < self.size:
                getattr(writer, f"add_{name}_token_id")(number)
        writer.add_add_bos_token(self._start is not None)
        writer.add_add_eos_token(self._end is not None)
        if template := tokenizer.chat_template:
            named = isinstance(template, dict)
            writer.add_chat_template([{"name": k, "template": v} for k, v in template.items()] if named else template)

    def _unsupported(self, what: str, instead: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"the tokenizer of {self.path} {what}, which cannot be exported to GGUF: {instead}"
        )

    def _check_merges(self) -> None:
        for key, known in _MERGING.items():
            if (value := self._model.get(key)) not in known:
                raise self._unsupported(f"has {key} {value!r}", f"niwaki can tell llama.cpp of {known[0]!r} alone")
        self._merges = [one if isinstance(one, str) else " ".join(one) for one in self._model["merges"]]
        if not self._merges or any(merge.count(" ") != 1 for merge in self._merges):
            raise self._unsupported("has no merges, or some with spaces", "llama.cpp writes each with one space")
        decoders = [str(step.get("type")) for step in _steps(self._content["decoder"], "decoders")]
        if not decoders or {*decoders} - (_FALLING_BACK if self._falls_back else {"ByteLevel"}):
            made = "of letters and bytes" if self._falls_back else "of bytes"
            raise self._unsupported(f"has the decoder {', '.join(decoders)}", f"llama.cpp makes text {made}")
        if self._falls_back:
            return
        if self._changes == [{"type": "NFC"}]:
            self.notes.append(
                "llama.cpp does not bring text into the form NFC, as this tokenizer does: a letter with its accent "
                "as a character of its own gives other tokens there"
            )
        elif self._changes:
            kinds = ", ".join(str(one.get("type")) for one in self._changes)
            raise self._unsupported(f"changes texts ({kinds})", "llama.cpp takes them as they are")

    def _check_alphabet(self) -> None:
        """Where a byte has no token, one program leaves it out before merging, the other after."""
        tokens = {byte: _byte_token(byte) for byte in range(0x100)} if self._falls_back else bytes_to_unicode()
        missing = {byte for byte, token in tokens.items() if token not in self._model["vocab"]}
        if not self._falls_back:
            missing -= {0xC0, 0xC1, *range(0xF5, 0x100)}  # no text has them
        rare = {*range(32), 0x7F, *range(0xF1, 0xF5)} - set(b"\t\n\r")
        if missing - rare or (missing and (self._falls_back or self._model.get("unk_token") is not None)):
            raise self._unsupported(f"has no token for {len(missing)} bytes", "llama.cpp leaves them out")
        if missing:
            self.notes.append(
                f"the tokenizer has no token for {len(missing)} bytes, those of control characters or of rare ones; "
                "around them llama.cpp can give other tokens"
            )

    def _check_added(self) -> None:
        """Tokens that are looked for in a text before it is split."""
        stripping = [each["content"] for each in self._added if each.get("lstrip") or each.get("rstrip")]
        for each in self._added:
            text = each["content"]
            flags = [name for name in ("lstrip", "rstrip", "single_word") if each.get(name)]
            is_word = "single_word" in flags or (flags and not (_is_special(each) or text in _TAKEN))
            if is_word or not text or "\0" in text:
                raise self._unsupported(
                    f"has the token {text!r} with {' and '.join(flags) or 'no text'}",
                    "llama.cpp looks for its text alone",
                )
            changed = self._backend.normalizer.normalize_str(text) if self._changes else text
            if each.get("normalized") and changed.replace(SPACE, " ") != text.replace(SPACE, " "):
                raise self._unsupported(
                    f"has the token {text!r}, normalized, which makes {changed!r} of it",
                    "llama.cpp looks for its text as it is",
                )
        #: Whether they take spaces away behind them as llama.cpp has it for models that are named so.
        self._strips = bool(stripping) and {each["content"] for each in self._added} >= {*_UNSTRIPPED, "</s>"}
        self._strips &= all(
            (bool(each.get("lstrip")), bool(each.get("rstrip"))) == (False, each["content"] not in _UNSTRIPPED)
            for each in self._added
        )
        if stripping and not self._strips:
            self.notes.append(f"llama.cpp keeps the spaces beside {_named(stripping)}, which this tokenizer takes away")

    def _check_names(self) -> None:
        """Names of tokens from which llama.cpp concludes what they are."""
        texts = {each["content"] for each in self._added}
        is_gemma4 = "<|tool_response>" in texts | self._model["vocab"].keys()  # of which it knows that </s> is ordinary
        taken = _TAKEN - {"</s>"} if is_gemma4 else _TAKEN
        names = sorted((self._model["vocab"].keys() & taken) - texts)
        for name in names:
            if self._is_made(name):
                raise self._unsupported(
                    f"has the ordinary token {name!r}", "llama.cpp ends texts at that, or takes it as special"
                )
        if names:
            self.notes.append(
                f"llama.cpp takes {_named(names)} for special, or for the end of a text, and finds it in texts; "
                "this tokenizer gives it for none"
            )
        ordinary = sorted(each["content"] for each in self._added if not _is_special(each))
        if ends := [text for text in ordinary if text in taken & _ENDS]:
            self.notes.append(f"llama.cpp ends a text at {_named(ends)}, which is an ordinary token here")

    def _is_made(self, name: str) -> bool:
        """Whether a text gives an ordinary token, alone or beside something."""
        text = name.replace(SPACE, " ")
        texts = [f"{before}{text}{behind}" for before in _BESIDE for behind in _BESIDE]
        number = self._model["vocab"][name]
        return any(number in made.ids for made in self._backend.encode_batch(texts, add_special_tokens=False))

    def _check_overlaps(self) -> None:
        """Where two tokens overlap in a text, this tokenizer takes the first one, and llama.cpp the longer one."""
        added = {each["content"]: each for each in self._added}
        beginnings = defaultdict[str, list[str]](list)
        for text in added:
            for i in range(1, len(text)):
                beginnings[text[:i]].append(text)
        found: list[tuple[str, str, str]] = []
        for left in sorted(added):
            for i in range(1, len(left)):
                found += [
                    (left, right, left[:i] + right)
                    for right in beginnings.get(left[i:], ())
                    if _are_taken_otherwise(added, left, right, left[:i] + right)
                ]
        whole = [text for text, each in added.items() if not each.get("normalized")]  # which is looked for first
        found += [(one, text, text) for text in sorted({*added} - {*whole}) for one in whole if one in text]
        for left, right, _ in found:
            if not any(_is_special(added[one]) for one in (left, right)):
                raise self._unsupported(
                    f"has the tokens {left!r} and {right!r}, which can overlap", "llama.cpp takes the longer one"
                )
        if found:
            left, right, text = found[0]
            self.notes.append(
                f"llama.cpp takes the longer one of {left!r} and {right!r} where they overlap, as in {text!r}"
            )

    def _find_splitter(self) -> str:
        whole, composed = bool(self._model.get("ignore_merges")), bool(self._changes)
        splits = [_plain(step) for step in self._splits]
        names = [name for name in _SPLITTINGS if splits == _steps(SPLITTINGS[name].steps, "pretokenizers")]
        if not names:
            shown = [{key: value for key, value in step.items() if key != "pattern"} for step in splits]
            raise self._unsupported(
                f"splits text in a way that llama.cpp has no name for ({shown})",
                f"niwaki knows those of {', '.join(_SPLITTINGS)}",
            )
        best = min(names, key=lambda name: (SPLITTINGS[name].whole != whole, SPLITTINGS[name].composed != composed))
        if SPLITTINGS[best].whole != whole and (unlike := self._not_merged()):
            if len(unlike) > len(self._model["vocab"]) / 100:
                raise self._unsupported(
                    f"has ignore_merges {whole}, and {len(unlike):,} tokens that merging does not make",
                    f"llama.cpp has {best}, which splits such text, with ignore_merges {not whole} alone",
                )
            does, other = ("splits", "takes") if whole else ("takes", "splits")
            self.notes.append(f"llama.cpp {does} {_named(unlike)}, which this tokenizer {other} as a whole")
        if best in _CASED:
            self.notes.append(
                "llama.cpp splits words otherwise at marks that are characters of their own (of Hindi or Thai) and at "
                "capitals beyond A to Z: such words can give other tokens"
            )
        return best

    def _not_merged(self) -> list[str]:
        """Tokens that merging does not make of their own text."""
        content = {**self._content, "model": {**self._model, "ignore_merges": False}}
        merging = type(self._backend).from_str(json.dumps(content)).model
        ordinary = self._model["vocab"].keys() - {each["content"] for each in self._added}
        return [text for text in sorted(ordinary) if [one.value for one in merging.tokenize(text)] != [text]]

    def _find_prefix(self) -> bool:
        """Whether there is a space before each text."""
        for changes, splits, prefix, unlike in _PREFIXES:
            if (self._changes, self._splits) == (changes, splits) and not self._model.get("ignore_merges"):
                if unlike:
                    self.notes.append(
                        "llama.cpp puts a space before each text and behind each special token, this tokenizer "
                        f"{unlike}"
                    )
                return prefix
        steps = [{k: v for k, v in step.items() if k != "pattern"} for step in (*self._changes, *self._splits)]
        raise self._unsupported(
            f"treats spaces in a way that llama.cpp has no name for ({steps}, ignore_merges "
            f"{bool(self._model.get('ignore_merges'))})",
            "niwaki knows those of Gemma, LLaMA 2 and Phi-3",
        )

    def _list_tokens(self) -> tuple[list[str], list[int]]:
        """Lists the tokens and their kinds by number, also of numbers that have no token."""
        added = {each["id"]: each for each in self._added}
        beyond = [each["content"] for number, each in added.items() if number >= self.size]
        if beyond:
            self.notes.append(f"the model has no place for {', '.join(map(repr, beyond))}; the file leaves that out")
        texts = {each["content"]: number for number, each in added.items()}
        vocabulary = {token: number for token, number in self._model["vocab"].items() if token not in texts}
        named = {**vocabulary, **{self._text_of(each): number for number, each in added.items()}}
        tokens: dict[int, str] = {}
        for token, number in named.items():
            if token in beyond:
                continue
            if not 0 <= number < self.size:
                raise CheckpointError(f"the tokenizer of {self.path} has the token {number}, of {self.size} it can be")
            if number in tokens:
                raise CheckpointError(f"{self.path} has two tokens {number}: {tokens[number]!r} and {token!r}")
            tokens[number] = token
        kinds = [_NORMAL if number in tokens else _UNUSED for number in range(self.size)]
        if self._falls_back:
            for byte in range(0x100):
                kinds[named[_byte_token(byte)]] = _BYTE
        for number, each in added.items():
            if number < self.size:
                kinds[number] = self._kind_of(each)
        for number in range(self.size):
            if number not in tokens:
                tokens[number] = f"[PAD{number}]"
                while tokens[number] in named:
                    tokens[number] = f"[{tokens[number]}]"
        return [tokens[number] for number in range(self.size)], kinds

    def _finds_spaces(self, each: dict[str, Any]) -> bool:
        """Whether an added token is looked for in a text whose spaces have been replaced."""
        return self._falls_back and bool(self._changes and each.get("normalized"))

    def _text_of(self, each: dict[str, Any]) -> str:
        text = str(each["content"])
        return text.replace(SPACE, " ") if self._finds_spaces(each) else text

    def _kind_of(self, each: dict[str, Any]) -> int:
        if _is_special(each):
            return CONTROL
        # Such a one stands for spaces, which are merged, and is looked for only where a text has that very character.
        is_merged = self._falls_back and SPACE in each["content"] and not self._finds_spaces(each)
        return _NORMAL if is_merged else USER

    def _find_scores(self) -> list[float]:
        """Gives each token a score: llama.cpp makes the one with the highest first, and so merges in the same order.

        It also merges what no merge is named for. Tokenizers that were made from SentencePiece have all there can be.
        """
        ranks, merges, last, apart = dict[str, int](), {*self._merges}, "", list[str]()
        for rank, merge in enumerate(self._merges):
            made = merge.replace(" ", "")
            if ranks.setdefault(made, rank) < rank and made != last and len({*made}) > 1:  # such runs grow as they are
                apart.append(made)
            last = made
        known = {token for token in self.tokens if len(token) > 1}
        more = [
            token
            for token, kind in zip(self.tokens, self.kinds, strict=True)
            if kind not in (CONTROL, USER)
            and any(
                f"{token[:i]} {token[i:]}" not in merges
                for i in range(1, len(token))
                if (i == 1 or token[:i] in known) and (i == len(token) - 1 or token[i:] in known)
            )
        ]
        if len(more) + len(apart) > len(ranks) / 100:
            raise self._unsupported(
                f"merges {len(more) + len(apart):,} of {len(ranks):,} tokens in an order of its own",
                "llama.cpp merges by scores, as SentencePiece does",
            )
        if unlike := [*more, *apart]:
            self.notes.append(f"llama.cpp merges {_named(unlike)} in other cases than this tokenizer")
        return [-float(ranks.get(token, len(self._merges))) for token in self.tokens]

    def _find_ends(self) -> tuple[int | None, int | None]:
        """The tokens that are put before a text and after it."""
        alone, whole = (list(self._tokenizer("a", add_special_tokens=each).input_ids) for each in (False, True))
        for start in range(len(whole) - len(alone) + 1):
            if whole[start : start + len(alone)] == alone:
                before, after = whole[:start], whole[start + len(alone) :]
                if len(before) <= 1 and len(after) <= 1 and all(one < self.size for one in (*before, *after)):
                    return (before[0] if before else None), (after[0] if after else None)
                template, text = str(self._tokenizer.chat_template), str(self._tokenizer.decode(before))
                if not after and text in template:  # GLM 4 has two
                    self.notes.append(f"llama.cpp does not put {text!r} before a text; the chat template has it")
                    return None, None
        raise self._unsupported(
            f"adds tokens to a text ({whole} for {alone})", "llama.cpp adds one before it and one after it"
        )

    def _find_stops(self, config_end: Any) -> list[int]:
        """Tokens at which llama.cpp has to end a text: first the one that it puts there, then the tokenizer's own."""
        file = self.path / "generation_config.json"
        given = read_json(file).get("eos_token_id") if file.is_file() else config_end
        given = given if isinstance(given, list) else [given]
        wanted = (self._tokenizer.eos_token_id, *given)
        stops = list(
            dict.fromkeys(one for one in (self._end, *wanted) if isinstance(one, int) and 0 <= one < self.size)
        )
        if self._end is not None and self._end not in wanted:
            self.notes.append(f"llama.cpp also ends a text at {self.tokens[self._end]!r}, as it puts that behind each")
        if not stops:
            number = 2 if self._falls_back else 11
            self.notes.append(
                f"no token ends a text; llama.cpp ends one at the token {number}, {self.tokens[number:][:1]}"
            )
        if unsaid := [self.tokens[one] for one in stops[3:] if self.tokens[one] not in _ENDS]:
            self.notes.append(f"llama.cpp does not end texts at {_named(unsaid)}, as transformers does")
        return stops[:3]


def _named(texts: list[str]) -> str:
    return several([repr(text) for text in texts], 3)


def _is_special(token: dict[str, Any]) -> bool:
    """Whether an added token is for programs, not for texts; by its looks too, as llama.cpp's own converter has it."""
    text = token["content"]
    around = (("<|", "|>"), (f"<{_BAR}", f"{_BAR}>"), ("<unused", ">"))
    looks = text in ("<pad>", "<mask>", "<2mass>", "[@BOS@]") or any(
        text.startswith(first) and text.endswith(last) for first, last in around
    )
    return bool(token.get("special")) or looks


def _are_taken_otherwise(added: dict[str, dict[str, Any]], left: str, right: str, text: str) -> bool:
    """Whether llama.cpp finds another one of two added tokens that overlap in a text."""
    taken, other = left, right  # the first one, but what is not normalized is looked for before all else
    if added[left].get("normalized") and not added[right].get("normalized"):
        taken, other = right, left
    if left == right or len(other.encode()) < len(taken.encode()):
        return False
    return taken is right or not any(text[:n] in added for n in range(len(left) + 1, len(text) + 1))


def _plain(step: dict[str, Any]) -> dict[str, Any]:
    """A step that splits by an expression, as it is written in other files."""
    if step["type"] != "Split" or "Regex" not in step["pattern"]:
        return step
    expression = step["pattern"]["Regex"].replace("\r", r"\r").replace("\n", r"\n")
    plain = {**step, "pattern": {"Regex": expression}}
    # The expressions that stand alone match all of a text: what they do not match, and this removes, is nothing.
    is_kept = (step["behavior"], step["invert"]) == ("Removed", True)
    return {**plain, "behavior": "Isolated", "invert": False} if is_kept and expression in _WHOLE else plain


def _steps(value: dict[str, Any] | None, several: str) -> list[dict[str, Any]]:
    """A step or a sequence of them as a list, without what changes no tokens."""
    if value is None:
        return []
    if value["type"] == "Sequence":
        return [step for part in value[several] for step in _steps(part, several)]
    return [{key: each for key, each in value.items() if key not in _HARMLESS}]


def _byte_token(byte: int) -> str:
    return f"<0x{byte:02X}>"
