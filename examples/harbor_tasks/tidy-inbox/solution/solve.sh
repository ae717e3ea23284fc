#!/bin/bash
set -e
cd /app/inbox
find . -type f -empty -delete
for file in *; do
  case "$file" in
    *.*) kind=$(printf %s "${file##*.}" | tr '[:upper:]' '[:lower:]') ;;
    *) kind=other ;;
  esac
  mkdir -p "/app/sorted/$kind"
  mv -- "$file" "/app/sorted/$kind/"
done
