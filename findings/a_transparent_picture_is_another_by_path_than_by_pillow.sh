#!/bin/sh
# A surprise about transformers' image processors: a PNG with a transparent background has other pixels when it is named
# by its path than when Pillow's picture of the same file is passed.
#
#   A good guess:  processor(images=[PATH]) and processor(images=[Image.open(PATH)]) are the same: both read the file by
#                  Pillow, and the processor makes RGB of any picture (do_convert_rgb).
#   What happens:  a path is opened by a helper that converts it to RGB at once, which drops the coverage: a wholly
#                  transparent red becomes red. Pillow's picture still has its coverage, and the processor lays it over
#                  white. Training data that names files and an application that opens them see other pictures.
#
# usage: findings/a_transparent_picture_is_another_by_path_than_by_pillow.sh   (python3 with venv and pip, a connection,
#        300 MB; a minute)
# Output seen:
#   transformers 5.23.0, pillow 12.0.0, Qwen2VLImageProcessorPil
#   by its path:       [200, 30, 40]
#   opened by Pillow:  [255, 255, 255]
# Exit status: 0 if the behaviour is still this one, 1 if it has changed, 77 without the packages.
set -u
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
cat >"$work/coverage.py" <<'PYTHON'
import sys

import numpy
import PIL
import transformers
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

path = sys.argv[1] + "/red.png"
Image.new("RGBA", (28, 28), (200, 30, 40, 0)).save(path)
processor = Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=28 * 28)


def first_pixel(picture):
    """The colour that the model gets, without the normalization."""
    patches = processor(images=[picture], return_tensors="np")["pixel_values"]
    colour = patches.reshape(len(patches), 3, -1)[0, :, 0]
    return [round(x) for x in (colour * numpy.array(processor.image_std) + processor.image_mean) * 255]


print(f"transformers {transformers.__version__}, pillow {PIL.__version__}, {type(processor).__name__}")
by_path, by_pillow = first_pixel(path), first_pixel(Image.open(path))
print(f"by its path:       {by_path}")
print(f"opened by Pillow:  {by_pillow}")
sys.exit(by_path != [200, 30, 40] or by_pillow != [255, 255, 255])
PYTHON
python3 -m venv "$work/venv" >/dev/null 2>&1 &&
    "$work/venv/bin/pip" -q install transformers==5.23.0 pillow==12.0.0 numpy==2.3.5 >/dev/null 2>&1 || {
    echo 'skipped: the packages cannot be installed'
    exit 77
}
"$work/venv/bin/python" "$work/coverage.py" "$work" 2>"$work/err" || {
    status=$?
    cat "$work/err" >&2
    exit $status
}
