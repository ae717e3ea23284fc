#!/bin/bash
awk '
    $4 >= 500 { errors++ }
    $5 > most { most = $5; slowest = $3 }
    END { printf "{\"requests\": %d, \"errors\": %d, \"slowest\": \"%s\"}\n", NR, errors, slowest }
' /app/access.log > /app/summary.json
