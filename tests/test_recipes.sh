#!/bin/sh
# The recipes of data/recipes for batch systems, Kubernetes and containers; starts by other launchers.
set -u
. tests/suite.sh
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive

small='--num-layers 1 --hidden-size 16 --num-attention-heads 2 --vocab-size 50 --seq-length 8 --mock-data --lr 1e-2
    --lr-decay-style constant --global-batch-size 8 --eval-iters 0 --device cpu'

torchrun_is_answered_with_the_command_to_use() {
    for program in "$train" "$infer"; do
        RANK=0 WORLD_SIZE=16 LOCAL_WORLD_SIZE=16 MASTER_ADDR=host refused \
            "torchrun.*; use: mpirun -np 16 $program .*srun --mpi=pmix -n 16 $program " "$program" --load none ||
            return 1
        RANK=0 WORLD_SIZE=16 LOCAL_WORLD_SIZE=8 MASTER_ADDR=host refused 'mpirun -np 16 --hostfile HOSTS ' \
            "$program" --load none || return 1
    done
    for variable in PMIX_RANK PMI_RANK; do # which srun gives torchrun, and torchrun each of its ranks
        # shellcheck disable=SC2086
        refused 'torchrun.*; use: mpirun -np 2 ' env RANK=0 WORLD_SIZE=2 MASTER_ADDR=host $variable=0 \
            TORCHELASTIC_RUN_ID=none "$train" $small --train-iters 1 || return 1
    done
    # one process is a run of its own, and so is a shell with a part of these variables
    for setting in 'RANK=0 WORLD_SIZE=1 MASTER_ADDR=host' 'RANK=1 WORLD_SIZE=4'; do
        # shellcheck disable=SC2086
        env $setting "$train" $small --train-iters 1 >"$work/out" 2>"$work/err" || return 1
    done
}

# One line answers the variables of Transformer Engine; a number of threads beyond any machine is refused by name.
variables_of_the_environment_have_an_answer() {
    # shellcheck disable=SC2086
    NVTE_FUSED_ATTN=0 NVTE_FOO=3 "$train" $small --train-iters 1 >"$work/out" 2>"$work/err" &&
        says 'NVTE_FUSED_ATTN (take --attention-backend); NVTE_FOO (nothing stands in for it)$' "$work/out" &&
        [ "$(grep -c NVTE_ "$work/out")" = 1 ] || return 1
    NVTE_FLASH_ATTN=1 "$infer" --load tests/golden/hf/gpt2 --prompt-tokens 1 --print-tokens --max-new-tokens 1 \
        --device cpu >"$work/out" 2>"$work/err" && says 'NVTE_FLASH_ATTN (take --attention-backend)' "$work/err" &&
        refused 'OMP_NUM_THREADS is 999999, and this machine has' env OMP_NUM_THREADS=999999 "$train" $small || return 1
    # LLVM's OpenMP ends the program by itself, before main.
    ! OMP_NUM_THREADS=2147483647 "$infer" --load none >"$work/out" 2>"$work/err" &&
        grep -q -e '^error: OMP_NUM_THREADS is 2147483647,' -e '^OMP: Error' "$work/err"
}

# Ranks of one host cross none, whatever the environment says; groups that the run does not have are not printed.
groups_of_one_host_cross_none() {
    [ -n "${HAVE_MPI:-}" ] && command -v mpirun >/dev/null || return 0
    # shellcheck disable=SC2086
    on_ranks 2 env OMPI_COMM_WORLD_LOCAL_SIZE=1 "$train" $small --train-iters 1 --tensor-model-parallel-size 2 &&
        says '^tensor  *2' "$work/out" &&
        ! grep -q '^\(expert\|context\|pipeline\)' "$work/out" && ! grep -q 'cross hosts' "$work/out"
}

# Scripts pass shellcheck, and Slurm reads their settings: they come before the first command.
slurm_scripts_are_sound() {
    if command -v shellcheck >/dev/null; then
        shellcheck data/recipes/*.sbatch >"$work/out" || return 1
    else
        echo "skipped: shellcheck is absent"
    fi
    for script in data/recipes/*.sbatch; do
        awk 'NR == 1 && $0 != "#!/bin/bash" { bad = 1 }
            !/^#/ { begun = 1 }
            /^#SBATCH/ { settings++; if (begun) bad = 1 }
            /^#SBATCH/ && $2 !~ /^--[a-z-]+(=[^ ]+)?$/ { bad = 1 } END { exit bad || !settings }' "$script" || return 1
    done
}

# srun is a stand-in that starts the ranks by mpirun.
slurm_scripts_train() {
    mkdir -p "$work/bin" "$work/submit"
    cat >"$work/bin/srun" <<'SH'
#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
exec $MPIRUN -np "$SLURM_NTASKS" "$@"
SH
    chmod +x "$work/bin/srun"
    cp launch.sh "$work/submit" && ln -sf "$train" "$work/submit/train" || return 1
    for script in data/recipes/*.sbatch; do
        # shellcheck disable=SC2086
        PATH="$work/bin:$PATH" MPIRUN=$(mpirun_here) SLURM_NTASKS=2 SLURM_CPUS_PER_TASK=1 \
            SLURM_SUBMIT_DIR="$work/submit" bash "$script" $small --train-iters 3 --save "$work/${script##*/}" \
            >"$work/out" 2>"$work/err" </dev/null || return 1
        [ "$(cat "$work/${script##*/}/latest_checkpointed_iteration.txt")" = 3 ] || return 1
        says 'DP 2' "$work/out" || return 1
    done
}

# The manifest is YAML; the launcher asks for as many ranks as the workers have slots, and mounts what it names.
the_manifest_is_a_sound_mpijob() {
    python3 - data/recipes/kubernetes-mpijob.yaml >"$work/out" 2>"$work/err" <<'PYTHON'
import sys, yaml

with open(sys.argv[1]) as file:
    (job,) = yaml.safe_load_all(file)
assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
assert set(job["spec"]) <= {"slotsPerWorker", "mpiImplementation", "launcherCreationPolicy", "runPolicy",
                            "mpiReplicaSpecs"}
replicas = job["spec"]["mpiReplicaSpecs"]
assert set(replicas) == {"Launcher", "Worker"}
for replica in replicas.values():
    pod = replica["template"]["spec"]
    volumes = [volume["name"] for volume in pod["volumes"]]
    for container in pod["containers"]:
        assert container["image"] and all(isinstance(word, str) for word in container["command"])
        assert all(mount["name"] in volumes for mount in container["volumeMounts"])
        assert all(isinstance(variable["value"], str) for variable in container.get("env", []))
command = replicas["Launcher"]["template"]["spec"]["containers"][0]["command"]
assert int(command[command.index("-n") + 1]) == replicas["Worker"]["replicas"] * job["spec"]["slotsPerWorker"]
limits = replicas["Worker"]["template"]["spec"]["containers"][0]["resources"]["limits"]
assert limits["nvidia.com/gpu"] == job["spec"]["slotsPerWorker"]
PYTHON
}

# hadolint where it is installed, and the rules that matter here: known instructions, first ARG or FROM; a base with a
# version; apt-get asks nothing and leaves no lists; no line is continued at the end.
the_dockerfile_is_sound() {
    file=data/recipes/Dockerfile
    if command -v hadolint >/dev/null; then
        hadolint --ignore DL3008 $file >"$work/out" || return 1 # versions of packages follow the distribution
    else
        echo "skipped: hadolint is absent; only the rules of this test are checked"
    fi
    awk '/^#/ || /^$/ { next }
        !continued { word = $1; count++
            if (word !~ /^(ARG|FROM|ENV|WORKDIR|COPY|RUN|CMD)$/) { print "unknown instruction: " $0; bad = 1 }
            if (count == 1 && word !~ /^(ARG|FROM)$/) { print "does not begin with FROM: " $0; bad = 1 } }
        /^ARG BASE=/ && ($0 !~ /:/ || /:latest/) { print "no version: " $0; bad = 1 }
        { text = text $0; continued = /\\$/; sub(/\\$/, "", text)
          if (!continued) {
              if (text ~ /apt-get install/ && (text !~ /install -y/ || text !~ /rm -rf \/var\/lib\/apt\/lists/)) {
                  print "apt-get asks, or leaves its lists: " text; bad = 1 }
              text = "" } }
        END { if (continued) { print "the last line continues"; bad = 1 } exit bad }' $file >"$work/out"
}

# recipe NAME GPUS [GPU]: the simulation of a recipe gives the memory and the time that its comment names.
recipe() {
    comment=$(sed -n 's/^# *//p' "data/recipes/$1.yaml" | tr '\n' ' ')
    "$train" --config "data/recipes/$1.yaml" --mock-data --explain --gpu "${3:-h200}" --gpus "$2" >"$work/out" \
        2>"$work/err" &&
        figures=$(awk '$1 == "step" && !s { s = sprintf("%.1f", $2 / 1000) }
            $1 == "memory" && !g { sub(/.*libraries /, ""); g = sprintf("%.0f", $1) }
            END { print "a GPU needs " g " GiB, and a step takes " s " s" }' "$work/out") || return 1
    case $comment in *"$figures"*) ;; *) echo "the comment does not say: $figures" && return 1 ;; esac
}

recipes_say_what_the_planner_finds() {
    recipe gpt-oss-20b-eight-h200 8 && recipe glm-4.5-air-64-h200 64 && recipe qwen3-next-80b-a3b-64-h200 64 &&
        recipe qwen3-next-80b-a3b-lora-eight-h200 8 && recipe qwen3.5-35b-a3b-eight-h200 8 &&
        recipe gpt2-124m-one-t4 1 t4 && recipe qwen3-8b-lora-24gb 1 rtx4090
}

# Adapters on a base in fp8: of 70 billion parameters on one H200, which has no room for a base in bf16; of the 671
# billion of DeepSeek-V3 on eight; of 8 billion on a T4, and on 12 GB as its recipe says.
a_base_in_fp8_fits_where_one_in_bf16_does_not() {
    explained="--mock-data --explain --gpus 1 --gpu"
    recipe llama3-70b-lora-one-h200 1 && recipe qwen3-8b-lora-one-t4 1 t4 &&
        recipe deepseek-v3-lora-eight-h200 8 || return 1
    # shellcheck disable=SC2086
    refused 'a GPU needs 150.* GiB, with CUDA and libraries, and the NVIDIA H200' "$train" --config \
        data/recipes/llama3-70b-lora-one-h200.yaml --lora-base-dtype model $explained h200 || return 1
    sed 's/^fp16:/bf16:/' data/recipes/qwen3-8b-lora-one-t4.yaml >"$work/3060.yaml" || return 1
    # shellcheck disable=SC2086
    "$train" --config "$work/3060.yaml" --seq-length 1024 $explained rtx3060 >"$work/out" 2>"$work/err" &&
        says 'of 11.6 GiB' "$work/out" || return 1
    # shellcheck disable=SC2086
    set -- "$train" --config data/recipes/qwen3-8b-lora-24gb.yaml --memory-limit 15GiB $explained rtx4090
    refused 'a GPU needs 18.* GiB' "$@" && "$@" --lora-base-dtype fp8 >"$work/out" 2>"$work/err" &&
        says 'of 15.0 GiB' "$work/out"
}

# The small GPUs of data/machines: each has a time, which falls from card to card; a T4 has no bf16.
small_gpus_are_planned() {
    set -- "$train" --hf-config data/configs/gpt2-124m.json --mock-data --train-iters 1 --lr 1e-4 --seq-length 1024 \
        --micro-batch-size 4 --global-batch-size 16 --explain --gpus 1
    before=1e9
    for gpu in rtx3060 t4 rtx3090 rtx4090 rtx5090 h200; do
        "$@" --fp16 --gpu $gpu >"$work/out" 2>"$work/err" || return 1
        time=$(awk '$1 == "step" { print $2; exit }' "$work/out")
        awk -v time="$time" -v before="$before" 'BEGIN { exit !(time > 0 && time < before) }' || return 1
        before=$time
    done
    "$@" --bf16 --gpu h200 >"$work/out" 2>"$work/err" || return 1
    awk -v fp16="$before" '$1 == "step" { exit !($2 > 0.97 * fp16 && $2 <= fp16) }' "$work/out" || return 1
    refused '--bf16 needs .* 8.0 or more; take --fp16' "$@" --bf16 --gpu t4
}

# planned SHAPE GPUS OPTION...: --plan finds a layout that has the options. A search without them takes minutes.
planned() {
    shape=$1 gpus=$2
    shift 2
    "$train" --hf-config "data/configs/$shape.json" --mock-data --bf16 --seq-length 4096 --micro-batch-size 1 \
        --global-batch-size 128 --train-iters 3 --lr 1e-4 --plan --gpu h200 --gpus "$gpus" \
        --tensor-model-parallel-size 1 --context-parallel-size 1 --data-parallel-sharding-strategy optim "$@" \
        >"$work/out" 2>"$work/err" && says '^1\. ' "$work/out"
}

# Qwen3-Next and GLM-4.5-Air have no room on 8 GPUs for the optimizer's state of all weights.
shapes_of_recipes_are_planned_on_8_and_64_gpus() {
    adapters='--lora-rank 16 --lora-target all-linear'
    four='--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 1'
    one='--pipeline-model-parallel-size 1 --expert-model-parallel-size 8 --moe-token-dispatcher-type alltoall'
    # shellcheck disable=SC2086
    planned qwen3-next-80b-a3b 8 $one $adapters && planned qwen3-next-80b-a3b 64 $four --expert-model-parallel-size 4 &&
        planned glm-4.5-air 8 $one $adapters && planned glm-4.5-air 64 --pipeline-model-parallel-size 4 \
            --expert-model-parallel-size 8 --moe-token-dispatcher-type alltoall &&
        planned qwen3.5-35b-a3b 8 $one && planned qwen3.5-35b-a3b 64 $one && planned gpt-oss-20b 8 $one &&
        planned gpt-oss-20b 64 $one &&
        planned nemotron-h-8b 8 && planned nemotron-h-8b 64
}

# A model whose kernels a GPU lacks has no layout, whatever its number of GPUs.
a_mixer_without_gpu_kernels_is_not_planned() {
    for gpus in 1 8; do
        set -- "$train" --mock-data --bf16 --finetune --seq-length 32 --global-batch-size 8 --train-iters 3 --lr 1e-4 \
            --plan --gpu h200 --gpus $gpus --load
        refused "no layout of $gpus GPUs is legal: .*a vision tower runs on the CPU only" "$@" \
            tests/golden/vision/qwen3_vl || return 1
        "$@" tests/golden/hf/mimo_v2_flash >"$work/out" 2>"$work/err" && says '^1\. ' "$work/out" || return 1
    done
}

# The planner has rows of text for a decoder alone.
models_with_other_inputs_are_not_planned() {
    refused 'an encoder-decoder is not timed so far' "$train" --load tests/golden/t5/t5 --sft --data-path x \
        --encoder-seq-length 24 --decoder-seq-length 16 --global-batch-size 8 --train-iters 3 --lr 1e-4 --bf16 \
        --finetune --plan --gpu h200 --gpus 1 &&
        refused 'a vision tower is not timed so far' "$train" --load tests/golden/vision/qwen3_vl --mock-data \
            --seq-length 48 --global-batch-size 8 --train-iters 3 --lr 1e-4 --bf16 --finetune --plan --gpu h200 --gpus 1
}

every_recipe_is_accepted() {
    for file in data/recipes/*.yaml; do
        grep -q '^hf_config:' "$file" || continue # others load a model
        "$train" --config "$file" --mock-data --print-config >"$work/out" 2>"$work/err" || return 1
        if grep -q 'do not make a run' "$work/out" "$work/err"; then
            echo "$file is not accepted"
            return 1
        fi
    done
}

for test in recipes_say_what_the_planner_finds a_base_in_fp8_fits_where_one_in_bf16_does_not small_gpus_are_planned \
    shapes_of_recipes_are_planned_on_8_and_64_gpus a_mixer_without_gpu_kernels_is_not_planned \
    models_with_other_inputs_are_not_planned every_recipe_is_accepted; do
    check $test $test
done
check torchrun_is_answered_with_the_command_to_use torchrun_is_answered_with_the_command_to_use
check variables_of_the_environment_have_an_answer variables_of_the_environment_have_an_answer
check groups_of_one_host_cross_none groups_of_one_host_cross_none
check slurm_scripts_are_sound slurm_scripts_are_sound
if [ -n "${HAVE_MPI:-}" ] && command -v mpirun >/dev/null && command -v bash >/dev/null; then
    check slurm_scripts_train slurm_scripts_train
else
    echo "skipped: slurm_scripts_train, MPI or bash is absent"
fi
if python3 -c 'import yaml' 2>/dev/null; then
    check the_manifest_is_a_sound_mpijob the_manifest_is_a_sound_mpijob
else
    echo "skipped: the_manifest_is_a_sound_mpijob, python3 has no yaml"
fi
check the_dockerfile_is_sound the_dockerfile_is_sound
exit $failed
