#!/bin/bash
cat "$SETTINGS/base.conf" "$SETTINGS/local.conf" | awk '
    /^#/ || /^[[:space:]]*$/ { next }
    { key = $0; sub(/ = .*/, "", key); value = $0; sub(/^[^=]* = /, "", value); values[key] = value }
    END { for (key in values) if (values[key] != "-") print key " = " values[key] }
' | LC_ALL=C sort > /app/merged.conf
