#!/usr/bin/env bash
# Fetch what `make gpu-check` needs on a machine that has Python and PyTorch with CUDA, but no package index.
#
#   benchmarks/gpu_wheels.sh OUT [PYTHON] [TORCH] [PART]     default: 3.12 2.11 50M
#
# Needs uv and pip. OUT then holds the wheels in parts of at most PART, sizes.txt, and install.sh, which
# joins them on that machine:
#
#   OUT/install.sh TARGET && export PYTHONPATH=TARGET
set -euo pipefail

if [ $# -lt 1 ] || [ $# -gt 4 ]; then
  sed -n '2,9s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
out=$1 python=${2:-3.12} torch=${3:-2.11} part=${4:-50M}
mkdir -p "$out"
out=$(realpath "$out")
cd "$(dirname "$0")/.."

pinned() {
  uv pip compile --quiet --no-header --no-annotate --no-emit-index-url \
    --python-version "$python" --python-platform x86_64-manylinux_2_28 \
    --constraint <(echo "torch==$torch.*") "$@"
}
# What PyTorch brings is there already.
there=$(pinned <(echo torch))
needed=$(pinned --extra bench pyproject.toml <(printf '%s\n' pytest pytest-timeout pytest-xdist))

wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
platforms=()
for tag in manylinux_2_28 manylinux_2_27 manylinux_2_24 manylinux_2_17 manylinux2014 manylinux_2_12 \
  manylinux2010 manylinux_2_5 manylinux1; do
  platforms+=(--platform "${tag}_x86_64")
done
for requirement in $needed; do
  if grep -qxF "$requirement" <<<"$there"; then
    continue
  fi
  python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: \
    --python-version "$python" "${platforms[@]}" --dest "$wheels" "$requirement" 2>/dev/null ||
    # Some packages have no wheels; those of pure Python can be made anywhere.
    python3 -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$wheels" "$requirement"
done

rm -f "$out"/*.whl.[0-9][0-9][0-9]
(cd "$wheels" && sha256sum -- *.whl) >"$out/sha256.txt"
(cd "$wheels" && du --apparent-size --block-size=K -- *.whl | sort -rn) >"$out/sizes.txt"
for wheel in "$wheels"/*.whl; do
  split --bytes "$part" --numeric-suffixes --suffix-length 3 "$wheel" "$out/$(basename "$wheel")."
done
cat >"$out/install.sh" <<'EOF'
#!/usr/bin/env bash
# Join the wheels that lie beside this file, and install them into the folder TARGET.
set -euo pipefail
target=$(realpath "$1")
cd "$(dirname "$0")"
whole=$(mktemp -d)
trap 'rm -rf "$whole"' EXIT
for first in *.whl.000; do
  cat "${first%.000}".[0-9][0-9][0-9] >"$whole/${first%.000}"
done
(sums=$(realpath sha256.txt) && cd "$whole" && sha256sum --check --quiet "$sums")
python3 -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target "$target" "$whole"/*.whl
EOF
chmod +x "$out/install.sh"
cat "$out/sizes.txt"
echo "$(wc -l <"$out/sizes.txt") wheels in $(find "$out" -name '*.whl.[0-9]*' | wc -l) parts: $out"
