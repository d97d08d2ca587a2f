#!/bin/sh
# Gets Godot 4 for the build and the tests of the addon: engine.sh DIRECTORY makes DIRECTORY/godot, which runs it, and
# DIRECTORY/gdextension_interface.h, which it writes. A godot4 or godot of version 4 in PATH is taken. Else, on Debian and
# Ubuntu, the package godot of Debian's release "forky" is fetched once with all it needs (160 MB) and unpacked in
# DIRECTORY; nothing is installed.
set -eu
mkdir -p "$1"
work=$(readlink -f -- "$1")
[ -f "$work/gdextension_interface.h" ] && exit 0

fetch() { # unpacks the engine and its libraries, down to the C library, in $work/root
  command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || {
    echo "Missing on this system: Godot 4, as godot in PATH" >&2
    exit 1
  }
  mkdir -p "$work/apt/lists" "$work/apt/cache" "$work/root"
  echo "deb [arch=amd64] http://deb.debian.org/debian forky main" > "$work/apt/sources.list"
  : > "$work/apt/status" # as if nothing were installed
  set -- -o "Dir::Etc::sourcelist=$work/apt/sources.list" -o Dir::Etc::sourceparts=- -o APT::Architecture=amd64 \
    -o "Dir::State::lists=$work/apt/lists" -o "Dir::State::status=$work/apt/status" -o "Dir::Cache=$work/apt/cache" \
    -o APT::Sandbox::User=root
  echo "fetching Godot 4"
  { apt-get "$@" update && apt-get "$@" -y --no-install-recommends --download-only install godot; } \
    > "$work/apt.log" 2>&1 || { tail "$work/apt.log" >&2; exit 1; }
  for package in "$work"/apt/cache/archives/*.deb; do dpkg-deb -x "$package" "$work/root"; done
  rm -r "$work/apt"
  libraries=$work/root/usr/lib/x86_64-linux-gnu
  cat > "$work/godot" <<END
#!/bin/sh
exec "$libraries/ld-linux-x86-64.so.2" --library-path "$libraries:$libraries/pulseaudio" "$work/root/usr/bin/godot" "\$@"
END
  chmod +x "$work/godot"
}

if [ ! -x "$work/godot" ]; then
  for program in godot4 godot; do
    found=$(command -v $program || true)
    case $([ -z "$found" ] || "$found" --headless --version 2>/dev/null || true) in
      4.*) ln -sf "$found" "$work/godot"; break ;;
    esac
  done
  [ -x "$work/godot" ] || fetch
fi
cd "$work" && HOME="$work" ./godot --headless --dump-gdextension-interface > dump.log 2>&1 \
  && [ -f gdextension_interface.h ] || { cat dump.log >&2; exit 1; }
