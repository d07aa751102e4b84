"""Draws ten pictures as PNG and JPEG, and writes pixels.safetensors: their patches by Hugging Face transformers.

Qwen2VLImageProcessorPil makes the patches, with small limits on the pixels, so that pictures grow, shrink and keep
their size; sets "clip" and "half" have the means and deviations of Qwen2.5-VL and of Qwen3-VL. Needs transformers 5.24
and Pillow 13:

    python3 tests/golden/images/make_pictures.py
"""

import os

import numpy as np
from PIL import Image, ImageDraw
from safetensors.numpy import save_file
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

folder = os.path.dirname(os.path.abspath(__file__))


def draw(mode, width, height, seed):
    """A gradient with shapes."""
    y, x = np.mgrid[0:height, 0:width]
    image = np.stack([x * 255 // max(width - 1, 1), y * 255 // max(height - 1, 1), (x * 7 + y * 13 + seed) % 256], -1)
    picture = Image.fromarray(image.astype(np.uint8), "RGB")
    shapes = ImageDraw.Draw(picture)
    shapes.ellipse([width // 6, height // 6, width // 2, height // 2], fill=(250, 20 + seed, 30))
    shapes.rectangle([width // 2, height // 2, width - 3, height - 2], fill=(10, 200, 255 - seed))
    if mode in ("RGBA", "LA"):
        picture = picture.convert(mode)
        picture.putalpha(Image.fromarray(((x + y) * 5 % 256).astype(np.uint8), "L"))
    return picture.convert(mode) if picture.mode != mode else picture


pictures = {
    "square.png": (draw("RGB", 32, 32, 0), {}),
    "large.png": (draw("RGB", 131, 97, 1), {}),
    "small.png": (draw("RGB", 5, 9, 2), {}),
    "wide.png": (draw("RGB", 150, 11, 3), {}),
    "gray.png": (draw("L", 50, 41, 4), {}),
    "alpha.png": (draw("RGBA", 47, 33, 5), {}),
    "gray_alpha.png": (draw("LA", 29, 37, 6), {}),
    "palette.png": (draw("RGB", 60, 44, 7).quantize(37), {"bits": 8}),
    "photo.jpg": (draw("RGB", 90, 71, 8), {"quality": 90}),
    "progressive.jpg": (draw("L", 38, 64, 9), {"quality": 80, "progressive": True}),
}
sets = {"clip": {}, "half": {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}}
tensors = {}
for name, (picture, options) in pictures.items():
    path = os.path.join(folder, name)
    picture.save(path, **options)
    for words, settings in sets.items():
        if words == "half" and name not in ("large.png", "photo.jpg"):
            continue
        processor = Qwen2VLImageProcessorPil(
            patch_size=4, merge_size=2, size={"shortest_edge": 256, "longest_edge": 1600}, **settings
        )
        out = processor(images=[Image.open(path)], return_tensors="np")
        tensors[f"{name}.{words}"] = out["pixel_values"].astype(np.float32)
        tensors[f"{name}.{words}.grid"] = out["image_grid_thw"].astype(np.int32)
save_file(tensors, os.path.join(folder, "pixels.safetensors"))
