import sys


def windows(numbers, width):
    for start in range(len(numbers) - width):
        yield numbers[start : start + width]


def main():
    width, path = int(sys.argv[1]), sys.argv[2]
    with open(path) as file:
        numbers = [float(line) for line in file if line.strip()]
    for window in windows(numbers, width):
        print(sum(window) / width)


main()
