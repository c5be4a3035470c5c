#!/usr/bin/env python3
"""Writes the tokenizer files beside it, and cases.json: texts with the ids of the reference libraries.

    python3 -m venv /tmp/venv && /tmp/venv/bin/pip install tokenizers tiktoken sentencepiece protobuf
    /tmp/venv/bin/python tests/parallel/tokenizers/make_fixtures.py

tests/parallel/tokenizer_file_test.cc compares Muster's ids with these. The tokenizers are small: a few hundred
tokens trained on the sentences below, in the forms of those that are published.
"""

import base64
import io
import json
import os
import random
import tempfile

import sentencepiece
import tiktoken
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

HERE = os.path.dirname(os.path.abspath(__file__))
SENTENCES = """
The quick brown fox doesn't jump over 12345 lazy dogs; they've SEEN it, and I'll tell them that we'd done it.
for (int i = 0; i < count; ++i) {\n    total += values[i];  // the sum of all values\n}\n\nreturn total;\n
Der Käfer läuft über die Straße, während die Schüler größere Übungen schreiben.
今天天气很好，我们去公园散步。他们说明天会下雨。
يقرأ الطالب الكتاب في المكتبة كل يوم.
Привет, мир! Это простое предложение для обучения.
नमस्ते दुनिया, यह एक छोटा वाक्य है।
안녕하세요, 오늘은 날씨가 좋습니다.
Σήμερα ο καιρός είναι καλός. ÉTÉ été ŒUVRE
https://example.org/a/b?c=1&d=2 \t\t tabs and   spaces
""".strip().split("\n")
CL100K = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
          r"|\s+(?!\S)|\s+")
O200K = "|".join([
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"])
# The regular expression of tiktoken's cl100k_base: white space at the end of a text is one pre-token.
CL100K_RANKS = (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$"
                r"|\s*[\r\n]|\s+(?!\S)|\s")


def byte_level(pattern):
    """The pre-tokenizer of GPT-2 (no pattern), or of Llama 3 and its relatives."""
    if pattern is None:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"),
                                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def trained(pattern, vocabulary=420):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = byte_level(pattern)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(SENTENCES * 3, trainer)
    return tokenizer


def changed(tokenizer, **model):
    """The same with other options of its model."""
    text = json.loads(tokenizer.to_str())
    text["model"].update(model)
    return Tokenizer.from_str(json.dumps(text))


def all_tokenizers():
    gpt2 = trained(None)
    gpt2.add_special_tokens(["<|endoftext|>"])
    yield "gpt2", gpt2

    llama3 = changed(trained(CL100K), ignore_merges=True)
    # A token that no merge leads to, which ignore_merges finds.
    text = json.loads(llama3.to_str())
    text["model"]["vocab"]["Ġzyzzyva"] = len(text["model"]["vocab"])
    llama3 = Tokenizer.from_str(json.dumps(text))
    llama3.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>"])
    begin = llama3.token_to_id("<|begin_of_text|>")
    llama3.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=False),
        processors.TemplateProcessing(single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", begin)])])
    yield "llama3", llama3

    qwen2 = trained(CL100K.replace("{1,3}", ""))
    qwen2.normalizer = normalizers.NFC()
    qwen2.add_special_tokens(["<|endoftext|>", "<|im_start|>"])
    yield "qwen2", qwen2

    yield "o200k", trained(O200K)

    llama2 = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    llama2.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    words = Tokenizer(models.BPE())
    words.normalizer = llama2.normalizer
    words.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    words.train_from_iterator(SENTENCES * 3, trainers.BpeTrainer(
        vocab_size=420, show_progress=False,
        special_tokens=["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]))
    text = json.loads(llama2.to_str())
    text["model"].update(vocab=json.loads(words.to_str())["model"]["vocab"],
                         merges=json.loads(words.to_str())["model"]["merges"])
    llama2 = Tokenizer.from_str(json.dumps(text))
    llama2.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                        decoders.Strip(" ", 1, 0)])
    llama2.add_special_tokens(["<unk>", "<s>", "</s>"])
    llama2.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    yield "llama2", llama2

    # Mistral's form: nothing is split, and only a document gets a space in front.
    text = json.loads(llama2.to_str())
    text.update(normalizer=None, post_processor=None,
                pre_tokenizer={"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False},
                decoder={"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False})
    yield "metaspace", Tokenizer.from_str(json.dumps(text))

    # T5's and XLM-R's form.
    unigram = Tokenizer(models.Unigram())
    unigram.normalizer = normalizers.Sequence([normalizers.Precompiled(character_map()),
                                               normalizers.Replace(Regex(" {2,}"), " "), normalizers.Strip(False, True)])
    unigram.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    unigram.decoder = decoders.Metaspace()
    unigram.train_from_iterator(SENTENCES * 3, trainers.UnigramTrainer(
        vocab_size=400, show_progress=False, unk_token="<unk>", special_tokens=["<pad>", "</s>", "<unk>"]))
    unigram.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    yield "unigram", unigram

    added = trained(None, 300)
    added.normalizer = normalizers.NFKC()
    added.add_tokens([AddedToken("WORD", single_word=True, normalized=False),
                      AddedToken("<left>", lstrip=True, normalized=False),
                      AddedToken("<right>", rstrip=True, normalized=False),
                      AddedToken("<right><right>", normalized=False),
                      AddedToken("fi x", normalized=True), AddedToken("Z", single_word=True, normalized=False)])
    yield "added", added


# Some of what SentencePiece's normalization "nmt_nfkc" replaces, whose table has 240 kB.
RULES = [(0xff21, "A"), (0xff42, "b"), (0x3000, " "), (0x9, " "), (0xa, " "), (0xa0, " "), (0xfb01, "fi"), (0x200b, ""),
         (0x1, ""), (0xbd, "1\u20442"), (0xa8, " \u0308")]
PAIRS = [("e\u0301", "é"), ("A\u030a", "Å"), ("\u1100\u1161", "\uac00"), ("\u0958", "\u0915\u093c")]


def sentence_piece(kind, **options):
    """The bytes of a model trained on the sentences."""
    model = io.BytesIO()
    with tempfile.NamedTemporaryFile("w", suffix=".tsv", encoding="utf-8") as rules:
        for source, target in [(chr(code), text) for code, text in RULES] + PAIRS:
            rules.write(" ".join(f"{ord(c):X}" for c in source) + "\t" + " ".join(f"{ord(c):X}" for c in target) + "\n")
        rules.flush()
        if "normalization_rule_name" not in options:
            options["normalization_rule_tsv"] = rules.name
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(SENTENCES * 3), model_writer=model, model_type=kind, hard_vocab_limit=False,
            minloglevel=2, num_threads=1, **options)
    trained_model = sentencepiece_model_pb2.ModelProto.FromString(model.getvalue())
    trained_model.normalizer_spec.ClearField("normalization_rule_tsv")  # the path of this run
    return trained_model.SerializeToString(deterministic=True)


def sentence_pieces():
    """(name, bytes) of models: Llama 2's form, T5's, one with symbols of the user, and one that keeps spaces."""
    yield "llama2", sentence_piece("bpe", vocab_size=500, byte_fallback=True, normalization_rule_name="identity",
                                   remove_extra_whitespaces=False, split_digits=True)
    yield "t5", sentence_piece("unigram", vocab_size=300, user_defined_symbols=["<sep>", "ab"])
    yield "bpe", sentence_piece("bpe", vocab_size=300, user_defined_symbols=["<sep>", "ab", "tabs"])
    yield "bytes", sentence_piece("unigram", vocab_size=520, byte_fallback=True, add_dummy_prefix=False,
                                  remove_extra_whitespaces=False)


def character_map():
    """The table of such a model: normalizer_spec.precompiled_charsmap."""
    model = sentencepiece_model_pb2.ModelProto.FromString(sentence_piece("unigram", vocab_size=300))
    return model.normalizer_spec.precompiled_charsmap


TEXTS = SENTENCES + [
    "", " ", "  ", "\n", "\r\n\r\n x", "a  b   c    d", "   \n\n  \n x \n", "trailing   ", "trailing \n  ", "\t\n\u3000x\u00a0\u00a0y",
    "I'M he'Ll 'tis x'ſ can't CAN'T 'S", "12345 6 1234567890 ٣٤٥ ½²Ⅷ", "HelloWorldHTTPServer2 fooBar ÀÉî ǅungla",
    "!!!\n\n//\n/x ///\r\n", "e\u0301 \u0301x \u0958 \ufb01 x \uac00 \u1100\u1161", "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea \U0001f600\U0001f600",
    "a\u0000b\u0001\u007f\u0080", "zyzzyva zyzzyva the zyzzyvas", "<|endoftext|>x<|endoftext|><|endoftext|> <|endoftext",
    "<s>hello</s> <unk>▁ ▁▁x ▁", "WORD WORDS xWORD WORD.WORD_ WORD-\u200dWORD ²WORD ⓐWORD",
    "x  <left>  y <left><left>", "x  <right>  y <right><right> z <right> <left> w", "ﬁ x fi x  Z ZZ Z", "é" * 40, "ab" * 50, " " * 70 + "x",
    "\u1c89\u1c8a\u0897 \U0002ebf0\U0002ebf1 \U0001ccf0\U0001ccf1", "\u0345\u2028\u2029\u0085x",
    "Ａｂ ｃ\u200b d\u3000\u3000e", "<sep>x <sep> ab<sep>tabs  ▁▁x xab", "foo ▁ bar▁baz▁", "\u0600 x \u0301 y",
    "☃☃ ☃\U0001f3f3☃", "½ ﬁ ﬁne A\u030a\u0301", "ab", "▁", "x\u00a0 y \u00a8 z", "<0x41> <pad></s><unk>",
    "\u4eca\u0327\u1ac8\u0341\u0301 q\u0898\u0334\u0345 \u32ff\ua7f2 \U00011935\U00011930 \u1112\u1161\u11ab\uac00\u11a8 a\u0301\u0327",
]


def random_texts(seed, count):
    draw = random.Random(seed)
    alphabets = ["abcdefgh ", "ABC'stdmrelv  ", "0123456789 .,", " \t\n\r\u00a0\u3000", "\u0301\u0327\u093e\u200d", "今天天气很好，。",
                 "يقرأ الطالب", "Приветмир ", "<|endoftext|>WORDright left", "▁ <>/s", "\U0001f600\U0001f469\u200d", "½²Ⅷ٣"]
    for _ in range(count):
        text = ""
        while len(text) < draw.randrange(1, 60):
            letters = draw.choice(alphabets)
            text += "".join(draw.choice(letters) for _ in range(draw.randrange(1, 9)))
        yield text


def main():
    # What the tokenizers are trained on, for bpe_trainer_test.cc.
    with open(os.path.join(HERE, "sentences.jsonl"), "w", encoding="ascii") as file:
        file.writelines(json.dumps({"text": sentence}) + "\n" for sentence in SENTENCES)
    cases = []
    texts = TEXTS + list(random_texts(7, 60))
    for name, tokenizer in all_tokenizers():
        tokenizer.save(os.path.join(HERE, name + ".json"), pretty=False)
        for text in texts:
            cases.append({"tokenizer": name + ".json", "text": text,
                          "ids": tokenizer.encode(text, add_special_tokens=False).ids})
        edges = tokenizer.encode("", add_special_tokens=True).ids
        cases.append({"tokenizer": name + ".json", "text": "", "around": edges, "ids": []})
        if name == "o200k":
            ranks = {}
            for token, rank in json.loads(tokenizer.to_str())["model"]["vocab"].items():
                ranks[bytes(BYTE_OF[c] for c in token)] = rank
            with open(os.path.join(HERE, "small.tiktoken"), "wb") as file:
                for token, rank in sorted(ranks.items(), key=lambda each: each[1]):
                    file.write(base64.b64encode(token) + b" %d\n" % rank)
            for pattern, regex in (("o200k", O200K), ("cl100k", CL100K_RANKS)):
                encoding = tiktoken.Encoding("small", pat_str=regex, mergeable_ranks=ranks, special_tokens={})
                for text in texts:
                    cases.append({"tokenizer": "small.tiktoken", "pattern": pattern, "text": text,
                                  "ids": encoding.encode_ordinary(text)})
    for name, model in sentence_pieces():
        with open(os.path.join(HERE, name + ".model"), "wb") as file:
            file.write(model)
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        for text in texts:
            ids = processor.encode(text)
            cases.append({"tokenizer": name + ".model", "text": text, "ids": ids, "decoded": processor.decode(ids)})
    with open(os.path.join(HERE, "cases.json"), "w", encoding="ascii") as file:
        file.write("[\n" + ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases) + "\n]\n")


def byte_alphabet():
    printable = [*range(0x21, 0x7f), *range(0xa1, 0xad), *range(0xae, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {**{chr(byte): byte for byte in printable}, **{chr(0x100 + i): byte for i, byte in enumerate(others)}}


BYTE_OF = byte_alphabet()

if __name__ == "__main__":
    main()
