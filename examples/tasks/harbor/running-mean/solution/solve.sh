#!/bin/sh
set -e
sed -i 's/len(numbers) - width)/len(numbers) - width + 1)/' mean.py
python3 mean.py 3 numbers.txt >answer.txt
