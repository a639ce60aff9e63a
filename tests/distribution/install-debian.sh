#!/bin/sh
# What the tests of containers, images, Nix and the aarch64 wheels run, from Debian; without it they skip, visibly. As root.
set -eu
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends buildah ca-certificates debian-archive-keyring diffoscope-minimal mmdebstrap podman \
    python3-dev qemu-user-static runc >/dev/null
