#!/usr/bin/env bash
# Train a model on drawings in seven styles from random weights, by the commands of this repository, and score it on
# pairs of concept and style that were held out: minutes on one GPU.
#
#   benchmarks/speedrun.sh STYLES OUT [cpu]       # STYLES: train-*.tar, heldout-*.tar; cpu: 32 px, tiny networks
#
# VAE_STEPS and STEPS set the lengths of the trainings; with a larger STEPS the same command continues. With CLIP, the
# folder of a CLIP model, CMMD is measured, too. OUT/seconds.txt gets the time of each step.
set -euo pipefail
[[ $# -ge 2 ]] || { sed -n '2,8s/^# \{0,1\}//p' "$0" >&2; exit 2; }
styles=$(realpath "$1") out=$(realpath -m "$2") metrics=()
[[ -z ${CLIP:-} ]] || metrics=("protocol.metrics=[fid, kid, cmmd]" "protocol.networks.cmmd=$(realpath "$CLIP")")
cd "$(dirname "$0")/.."
mkdir -p "$out"
trap 'kill $(jobs -p) 2> /dev/null || true' EXIT

if [[ ${3:-gpu} == cpu ]]; then
  side=32
  autoencoder=(yamls/tiny/autoencoder.yaml "trainer.max_duration=${VAE_STEPS:-3000}ba" schedule.warmup=0.05dur
    optimizer.name=adamw optimizer.lr=1.6e-3 autoencoder.kl_weight=1e-2)
  transformer=(yamls/tiny/modern.yaml "trainer.max_duration=${STEPS:-3000}ba" model.text_encoder.chunks=2
    "algorithms.ema={start: 0.5dur, decays: [0.99]}" "samples.prompts=[]" "data.caption_weights=[1, 0]"
    schedule.warmup=0.05dur)
else
  side=128
  autoencoder=(yamls/styles/autoencoder.yaml "trainer.max_duration=${VAE_STEPS:-1000}ba")
  transformer=(yamls/styles/transformer.yaml "trainer.max_duration=${STEPS:-1500}ba")
fi

step() {  # NAME COMMAND...
  local name=$1 start=$SECONDS
  shift
  echo "== $name: $*"
  "$@"
  echo "$name $((SECONDS - start))" | tee -a "$out/seconds.txt"
}
both() {  # the same for training and held-out drawings: COMMAND, which gets the name of the set
  "$1" held-out &
  "$1" training
  wait $!
}
prepare() {
  [[ ! -f $out/$1/manifest.json ]] || return 0  # prepared before
  local tars=train
  [[ $1 == training ]] || tars=heldout
  python scripts/prepare.py "$styles/$tars"-*.tar "$out/$1" --edges "$side" --quiet --no-report
}
encode() {
  python scripts/encode.py "$out/$1" "$out/$1-latents" --resolution "$side" --mean-only --architecture tiny_transformer \
    --chunks 2 --vae "$out/autoencoder/vae"
}
train() {  # RUN SUFFIX_OF_THE_DATA YAML [OVERRIDE...]
  composer -n 1 run.py "$3" run_name="styles-$1" output_folder="$out/$1" data.local="$out/training$2/train" \
    validation.local="$out/held-out$2/train" "data.streams=[{name: $side-up}]" "${@:4}"
}
evaluate() {
  python evaluate.py yamls/styles/evaluate.yaml model="$out/transformer" output_folder="$out/evaluation" \
    protocol.prompts.path="$out/held-out" protocol.reference.path="$out/held-out" protocol.reference.size="$side" "${metrics[@]}"
}
scores() {
  local held_out="python -m benchmarks.held_out" images
  images=$(printf '%s\n' "$out"/evaluation/images/*/prompts | sort -V | tail -n 1)  # of the newest checkpoint
  $held_out prompts "$out/training" "$out/held-out" --out "$out"
  python scripts/generate.py "$out/transformer" --weights ema --prompts-file "$out/cells.jsonl" --out "$out/cells" \
    --guidance-scale 2 --steps 30 --seed 0
  $held_out scores "$out/training" "$out/held-out" "$images" --cells "$out/cells" --out "$out"
}

step prepare both prepare
step autoencoder train autoencoder "" "${autoencoder[@]}"
step encode both encode
step transformer train transformer -latents "${transformer[@]}" model.vae="$out/autoencoder/vae"
step evaluate evaluate
step scores scores
