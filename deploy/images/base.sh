#!/usr/bin/env bash
# Makes a base image of nothing but glibc, libstdc++ and certificates, 15 MB without a shell, from Debian 12's packages:
#   deploy/images/base.sh ROOT.tar
#   podman import ROOT.tar localhost/muster-base
# For sites without a registry, and for those who want nothing in an image that the programs do not load.
set -euo pipefail
output=$(realpath -m "${1:?usage: base.sh ROOT.tar}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
chmod 755 "$work"
cd "$work"
mkdir packages root
(cd packages && apt-get download -qq libc6 libstdc++6 libgcc-s1 ca-certificates 2>/dev/null)
for package in packages/*.deb; do dpkg-deb -x "$package" root; done
# What nobody loads.
rm -rf root/usr/share/{doc,lintian,man,gdb} root/usr/sbin root/usr/lib/x86_64-linux-gnu/{audit,gconv} root/usr/bin root/sbin
mkdir -p root/{tmp,dev,proc,sys,run,var/lib/muster,var/lib/muster-worker} root/etc/ssl/certs
chmod 1777 root/tmp
chmod 777 root/var/lib/muster root/var/lib/muster-worker
find root/usr/share/ca-certificates -name '*.crt' | LC_ALL=C sort | xargs cat >root/etc/ssl/certs/ca-certificates.crt
echo 'root:x:0:0::/:
muster:x:7600:7600::/:' >root/etc/passwd
echo 'root:x:0:
muster:x:7600:' >root/etc/group
echo 'hosts: files dns' >root/etc/nsswitch.conf
tar -C root --sort=name --owner=0 --group=0 --numeric-owner --mtime=@0 -cf "$output" .
