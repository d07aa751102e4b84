#!/bin/sh
# notes/first-hour.ipynb: a valid notebook of format 4 without stored outputs, whose links lead somewhere, and which
# runs from top to bottom on the CPU, by `jupyter nbconvert --execute` of the system or of `make deps-dev`.
set -u
. tests/suite.sh
notebook=notes/first-hour.ipynb
python=python3
if ! "$python" -c 'import nbconvert, ipykernel' 2>/dev/null; then python=build/python/bin/python; fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

# cells PROGRAM: runs a Python program with the notebook as `book`.
cells() {
    python3 -c "import json, os, re, sys
book = json.load(open('$notebook'))
$1" >"$work/out" 2>"$work/err" </dev/null
}

# The rules of nbformat 4.5: the fields of a cell by its type, and identifiers that differ.
is_a_notebook_without_outputs() {
    cells "
assert book['nbformat'] == 4 and book['nbformat_minor'] >= 5 and set(book) == {
    'cells', 'metadata', 'nbformat', 'nbformat_minor'}, 'format'
names = [cell['id'] for cell in book['cells']]
assert len(set(names)) == len(names) and all(re.fullmatch('[A-Za-z0-9_-]{1,64}', name) for name in names), 'ids'
for cell in book['cells']:
    fields = {'cell_type', 'id', 'metadata', 'source'}
    if cell['cell_type'] == 'code':
        fields |= {'execution_count', 'outputs'}
        assert cell['outputs'] == [] and cell['execution_count'] is None, 'outputs are stored'
        compile(''.join(cell['source']), cell['id'], 'exec')
    else:
        assert cell['cell_type'] == 'markdown', cell['cell_type']
    assert set(cell) == fields and cell['metadata'] == {}, cell['id']
    assert all(line.endswith(chr(10)) for line in cell['source'][:-1]), cell['id']
    assert all(len(line) <= 121 for line in cell['source']), cell['id']
" || return 1
    "$python" -c 'import nbformat' 2>/dev/null || return 0
    "$python" -c "import nbformat; nbformat.validate(nbformat.read('$notebook', 4))" >"$work/out" 2>"$work/err"
}

its_links_lead_somewhere() {
    cells "
text = ''.join(''.join(cell['source']) for cell in book['cells'] if cell['cell_type'] == 'markdown')
links = re.findall(r'\]\(([^)#]+)[^)]*\)', text)
lost = [link for link in links if not os.path.exists('notes/' + link)]
assert len(links) > 5 and not lost, lost
" && says 'first-hour.ipynb' README.md && says 'first-hour.ipynb' notes/README.md
}

# Elsewhere it clones the project, and without an address it says what to do.
without_the_project_it_asks_for_an_address() {
    cells "
code = [''.join(cell['source']) for cell in book['cells'] if cell['cell_type'] == 'code'][:2]
os.chdir('$work')
try:
    exec(code[0] + chr(10) + code[1])
except SystemExit as end:
    print(end)
" && says 'set REPOSITORY in the first cell' "$work/out" && says '^cores: [1-9]' "$work/out" &&
        says '^GPU' "$work/out"
}

# A copy of the notebook has the outputs: each cell has run, and the loss has fallen.
it_runs_from_top_to_bottom() {
    FIRST_HOUR_ITERATIONS=20 FIRST_HOUR_FOLDER="$work/run" CUDA_VISIBLE_DEVICES='' MT_BIN="${MT_BIN:-.}" \
        JUPYTER_CONFIG_DIR="$work/jupyter" IPYTHONDIR="$work/ipython" JUPYTER_RUNTIME_DIR="$work/runtime" \
        timeout $((3 * hang)) "$python" -m jupyter nbconvert --execute --to notebook \
        --ExecutePreprocessor.timeout=$((2 * hang)) --output ran.ipynb --output-dir "$work" "$notebook" \
        >"$work/out" 2>"$work/err" </dev/null || return 1
    cells "
book = json.load(open('$work/ran.ipynb'))
ran = [cell for cell in book['cells'] if cell['cell_type'] == 'code']
assert all(cell['execution_count'] for cell in ran), 'a cell did not run'
text = ''.join(''.join(output.get('text', [])) for cell in ran for output in cell['outputs'])
kinds = {kind for cell in ran for output in cell['outputs'] for kind in output.get('data', {})}
losses = re.search(r'loss ([0-9.]+) at first, ([0-9.]+) at the end', text)
assert float(losses[2]) < float(losses[1]) - 0.5, losses[0]
assert 'image/svg+xml' in kinds and any('srcdoc' in ''.join(output['data'].get('text/html', '')) for cell in ran
    for output in cell['outputs'] if 'data' in output), kinds
assert text.count('relative difference') == 5 and 'build/puzzle-1' in text, text
"
}

check is_a_notebook_without_outputs is_a_notebook_without_outputs
check its_links_lead_somewhere its_links_lead_somewhere
check without_the_project_it_asks_for_an_address without_the_project_it_asks_for_an_address
if ! "$python" -c 'import nbconvert, ipykernel' 2>/dev/null; then
    echo "skipped: running it needs nbconvert and ipykernel (make deps-dev)"
elif [ -z "${HAVE_MPI:-}" ] || ! [ -x "${MT_BIN:-.}/data/preprocess" ] || ! command -v mpicc >/dev/null; then
    echo "skipped: running it needs MPI and the programs"
else
    check it_runs_from_top_to_bottom it_runs_from_top_to_bottom
fi
exit $failed
