#!/usr/bin/env python3
"""Draws pictures of coloured shapes, and conversations about them, for `make demo-vision`; makes a page of its answers.

    data/scripts/shapes.py FOLDER [--train 3000] [--test 200] [--size 48] [--seed 1]

FOLDER gets pictures/N.png; train.jsonl and test.jsonl, whose lines have "messages" and "images"; questions.jsonl, the
lines of test.jsonl without the answers of the assistant, which are in "answer"; and tokenizer/, with a chat template and
the sizes of patches. A picture has one or two shapes on a noisy ground, in places of a grid of three by three; the
answer names the colour and place of each, from the top left on. No training picture has a circle, square or triangle of
a colour in one of the nine places, another one for each, and every second picture of the test has only such.

    data/scripts/shapes.py FOLDER ITERATION=ANSWERS.jsonl ... --page PAGE.html

ANSWERS are those of `infer --prompts FOLDER/questions.jsonl` after training for so many iterations. Prints the share of
right ones after each, and writes pictures and the last answers as a page, with curves.svg of the page's folder if there
is one.
"""
import argparse
import base64
import html
import json
import os
import random
import struct
import zlib

COLOURS = {"red": (214, 39, 40), "green": (44, 160, 44), "blue": (31, 80, 200), "yellow": (240, 210, 30),
           "purple": (148, 60, 189), "white": (250, 250, 250)}
SHAPES = ("circle", "square", "triangle")
PLACES = [row + " " + column for row in ("top", "middle", "bottom") for column in ("left", "center", "right")]
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
TEMPLATE = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content %}
            {{- '<|vision_start|><|image_pad|><|vision_end|>' if part.type == 'image' else part.text }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{{- '<|im_start|>assistant\\n' if add_generation_prompt }}
"""


def write_png(path, size, pixels):
    """A square picture; pixels: red, green and blue of each, row by row."""
    rows = b"".join(b"\0" + pixels[3 * size * y : 3 * size * (y + 1)] for y in range(size))
    parts = ((b"IHDR", struct.pack(">2I5B", size, size, 8, 2, 0, 0, 0)), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    with open(path, "wb") as file:
        file.write(b"\x89PNG\r\n\x1a\n")
        for name, data in parts:
            file.write(struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)))


def is_inside(shape, x, y):
    """x, y: from the middle of the shape, -1 to 1."""
    if shape == "circle":
        return x * x + y * y <= 1
    if shape == "square":
        return max(abs(x), abs(y)) <= 0.85
    return -1 <= y <= 0.8 and abs(x) <= (y + 1) / 1.8


def draw(size, items):
    ground = random.randint(20, 110)
    pixels = bytearray(max(0, min(255, ground + random.randint(-12, 12))) for _ in range(3 * size * size))
    for colour, shape, place in items:
        cell = size / 3
        radius = cell * random.uniform(0.3, 0.42)
        slack = cell / 2 - radius
        cx = (place % 3 + 0.5) * cell + random.uniform(-slack, slack)
        cy = (place // 3 + 0.5) * cell + random.uniform(-slack, slack)
        for y in range(size):
            for x in range(size):
                if is_inside(shape, (x + 0.5 - cx) / radius, (y + 0.5 - cy) / radius):
                    pixels[3 * (y * size + x) : 3 * (y * size + x) + 3] = bytes(COLOURS[colour])
    return bytes(pixels)


def is_kept_back(colour, shape, place):
    """True for the place of each colour and shape that no training picture has."""
    return (2 * list(COLOURS).index(colour) + 5 * SHAPES.index(shape)) % 9 == place


def choose(kept_back):
    items = []
    places = random.sample(range(9), random.randint(1, 2))
    for place in sorted(places):
        while True:
            item = (random.choice(list(COLOURS)), random.choice(SHAPES), place)
            if is_kept_back(*item) == kept_back:
                break
            if kept_back and not any(is_kept_back(c, s, place) for c in COLOURS for s in SHAPES):
                return choose(kept_back)
        items.append(item)
    return items


def write_lines(folder, name, count, size, first):
    with open(os.path.join(folder, name + ".jsonl"), "w") as file:
        for i in range(count):
            items = choose(name == "test" and i % 2 == 1)
            picture = f"pictures/{first + i}.png"
            write_png(os.path.join(folder, picture), size, draw(size, items))
            answer = ", ".join(f"{colour} {PLACES[place]}" for colour, _, place in items)
            file.write(json.dumps({"messages": [{"role": "user", "content": "<image>What is where?"},
                                                {"role": "assistant", "content": answer}], "images": [picture]}) + "\n")


def read_lines(path):
    with open(path) as file:
        return [json.loads(line) for line in file]


def write_questions(folder):
    with open(os.path.join(folder, "questions.jsonl"), "w") as file:
        for line in read_lines(os.path.join(folder, "test.jsonl")):
            line["answer"] = line["messages"].pop()["content"]
            file.write(json.dumps(line) + "\n")


def write_tokenizer(folder):
    with open("data/demo-tokenizer.json") as file:
        tokenizer = json.load(file)
    count = len(tokenizer["model"]["vocab"])
    tokenizer["added_tokens"] += [{"id": count + i, "content": text, "single_word": False, "lstrip": False,
                                   "rstrip": False, "normalized": False, "special": True}
                                  for i, text in enumerate(SPECIAL)]
    files = {"tokenizer.json": json.dumps(tokenizer), "tokenizer_config.json": json.dumps({"eos_token": "<|im_end|>"}),
             "chat_template.jinja": TEMPLATE,
             "preprocessor_config.json": json.dumps({"patch_size": 8, "merge_size": 2, "temporal_patch_size": 2,
                                                     "size": {"shortest_edge": 256, "longest_edge": 65536}})}
    for name, text in files.items():
        with open(os.path.join(folder, name), "w") as file:
            file.write(text)


PAGE = """<!DOCTYPE html>
<html lang="en"><meta charset="utf-8"><title>Shapes</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body {{ font: 16px/1.4 sans-serif; max-width: 64em; margin: 2em auto; padding: 0 1em; color: #222; background: #fff }}
.pictures {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(11em, 1fr)); gap: 1em }}
figure {{ margin: 0 }} figure img {{ width: 100%; image-rendering: pixelated; border-radius: 4px }}
figcaption.wrong {{ color: #b00020 }} td, th {{ padding: .2em 1em .2em 0; text-align: right }}
svg, img.curves {{ max-width: 100%; height: auto }}
</style>
<h1>A small model learns to name what it sees</h1>
<p>Question: <q>What is where?</q> The pictures were drawn by <code>data/scripts/shapes.py</code>; the model began with
random numbers, and none of these pictures was trained on. Half of them have shapes in places where no training picture
has one of this colour and form: new combinations.</p>
<table><tr><th>iterations<th>right<th>new combinations</tr>{rows}</table>
<h2>Answers after {last} iterations</h2>
<div class="pictures">{figures}</div>
{curves}
"""


def figure(folder, line, answer):
    with open(os.path.join(folder, line["images"][0]), "rb") as file:
        picture = base64.b64encode(file.read()).decode()
    wrong = answer != line["answer"]
    text = html.escape(answer) + (f"<br>(it is: {html.escape(line['answer'])})" if wrong else "")
    kind = ' class="wrong"' if wrong else ""
    return (f'<figure><img alt="{html.escape(line["answer"])}" src="data:image/png;base64,{picture}">'
            f"<figcaption{kind}>{text}</figcaption></figure>")


def write_page(folder, path, files):
    lines = read_lines(os.path.join(folder, "questions.jsonl"))
    rows, answers, last = "", [], ""
    for item in files:
        last, file = item.split("=", 1)
        answers = [line["text"].strip() for line in read_lines(file)]
        if len(answers) != len(lines):
            raise SystemExit(f"{file} has {len(answers)} answers, and there are {len(lines)} questions")
        right = [answer == line["answer"] for answer, line in zip(answers, lines)]
        shares = [100 * sum(some) / max(len(some), 1) for some in (right, right[1::2])]
        print(f"after {last} iterations {shares[0]:.1f}% of {len(lines)} answers are right, of new combinations"
              f" {shares[1]:.1f}%")
        rows += f"<tr><td>{last}<td>{shares[0]:.1f}%<td>{shares[1]:.1f}%</tr>"
    curves = os.path.join(os.path.dirname(path) or ".", "curves.svg")
    image = ""
    if os.path.exists(curves):
        with open(curves, "rb") as file:
            data = base64.b64encode(file.read()).decode()
        image = f'<h2>Training</h2><p><img class="curves" alt="loss and other curves" src="data:image/svg+xml;base64,{data}"></p>'
    wrong = [i for i, line in enumerate(lines) if answers[i] != line["answer"]]
    shown = sorted(set(range(24)) | set(wrong[:12]))
    figures = "".join(figure(folder, lines[i], answers[i]) for i in shown if i < len(lines))
    with open(path, "w") as file:
        file.write(PAGE.format(rows=rows, curves=image, last=last, figures=figures))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("folder")
    parser.add_argument("answers", nargs="*", help="ITERATION=FILE of infer --prompts")
    parser.add_argument("--page", help="write this page")
    parser.add_argument("--train", type=int, default=3000, help="pictures")
    parser.add_argument("--test", type=int, default=200)
    parser.add_argument("--size", type=int, default=48, help="pixels of a side")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.page:
        write_page(options.folder, options.page, options.answers)
        return
    random.seed(options.seed)
    for name in ("pictures", "tokenizer"):
        os.makedirs(os.path.join(options.folder, name), exist_ok=True)
    write_tokenizer(os.path.join(options.folder, "tokenizer"))
    write_lines(options.folder, "train", options.train, options.size, 0)
    write_lines(options.folder, "test", options.test, options.size, options.train)
    write_questions(options.folder)


main()
