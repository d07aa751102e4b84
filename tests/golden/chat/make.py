#!/usr/bin/env python3
"""Writes the vectors of one chat template: make.py TEMPLATE FOLDER [TOKENIZER.json] > TEMPLATE.json

FOLDER holds the tokenizer.json and tokenizer_config.json of a model with this template. With TOKENIZER.json, the ids
are those of that tokenizer with the special tokens of the template: FOLDER then has any tokenizer.json, and the model's
chat_template, bos_token and eos_token.
"""
import json
import sys

from tokenizers import Tokenizer
from transformers import AutoTokenizer

special = {
    "mistral": ["<s>", "[INST]", "[/INST]", "</s>"],
    "deepseek3": [f"<\uff5c{name}\uff5c>" for name in
                  ("begin\u2581of\u2581sentence", "User", "Assistant", "end\u2581of\u2581sentence")],
}


def chat(*contents, system=None):
    messages = [] if system is None else [{"role": "system", "content": system}]
    for i, content in enumerate(contents):
        messages.append({"role": "assistant" if i % 2 else "user", "content": content})
    return messages


conversations = [
    chat("Hello", "Hi there!"),
    chat("Hello"),
    chat("What is 2 + 2?", "4", system="You are a calculator."),
    chat("What is 2 + 2?", system="You are a calculator."),
    chat("Hi", "Hello!", "How are you?", "Fine, and you?", "Good."),
    chat("Hi", "Hello!", "How are you?", "Fine, and you?", system="Answer briefly."),
    chat("Hi", "Hello!", "How are you?", "Fine.", "Bye", "Bye!", "Wait", "Yes?", "Nothing.", "OK."),
    chat("Grüße aus Köln", "Schöne Grüße zurück!"),
    chat("你好，世界", "你好！有什么可以帮您？", system="你是一个助手。"),
    chat("emoji 👩‍👩‍👧 and é", "e\u0301 is é; Ω ≠ Ω", "ok"),
    chat("", ""),
    chat("empty answer", "", "again", ""),
    chat("  spaces around  ", "  more spaces  ", system="  system with spaces "),
    chat("trailing newline\n", "answer\n\n", "\n\nleading newlines", "\n\nlead"),
    chat("tabs\tand\r\nlines\n\n\nend", "\tcode:\n    x = 1\n\n    y = 2\n"),
    chat("def f(x):\n    return x ** 2\n", "```python\nprint(f(3))\n```", system=""),
    chat("1234567890 3.14159 1e-5", "12345, 67890."),
    chat("Don't you'll I'M we'd", "It's they're I've"),
    chat("think", "<think>\nthe sum is 4\n</think>\n\n4", "again", "<think>\n\nsame\n</think>\n\nstill 4"),
    chat("\u00a0nbsp\u3000", "\u2003wide\u00a0", "x" * 70),
]

name, folder = sys.argv[1:3]
tokenizer = AutoTokenizer.from_pretrained(folder)
other = Tokenizer.from_file(sys.argv[3]) if len(sys.argv) > 3 else None
if other:
    other.add_special_tokens(special[name])
vectors = []
for messages in conversations:
    generates = messages[-1]["role"] == "user"
    # Mistral's template leaves out the system message of a conversation that ends with a response
    if name == "mistral" and messages[0]["role"] == "system" and not generates:
        messages, generates = messages[:-1], True
    vector = {"messages": messages, "generates": generates}
    vector["text"] = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generates)
    if other:
        vector["ids"] = other.encode(vector["text"], add_special_tokens=False).ids
    else:
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=generates, return_dict=False)
        assert ids == tokenizer(vector["text"], add_special_tokens=False)["input_ids"]
        vector["ids"] = ids
    vectors.append(vector)
lines = ",\n".join(json.dumps(v, ensure_ascii=False) for v in vectors)
print('{"template": "%s", "vectors": [\n%s\n]}' % (name, lines))
