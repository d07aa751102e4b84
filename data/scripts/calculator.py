#!/usr/bin/env python3
"""An environment of reinforcement learning: a calculator as a tool.

    ./train --stage rl --env-command 'python3 data/scripts/calculator.py' ...

The model calls it by [12 * (3 + 4)], which is then all of its message, or as models of Hugging Face call tools, by
<tool_call>{"name": "calculator", "arguments": {"expression": "12 * (3 + 4)"}}</tool_call>. The result is a message of
the role --role (tool), in the form of --result, where {} is the number. A message without a call ends the conversation;
its reward is 1 if its last number is the answer of the prompt, else 0. A line for each line: see --env-command.
"""
import argparse
import ast
import json
import operator
import re
import sys
from fractions import Fraction

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
             ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.UAdd: operator.pos, ast.USub: operator.neg}
LONGEST = 200  # characters of an expression
LARGEST = 10**40  # of any number on the way


def value_of(node):
    """The value of an expression of numbers, + - * / // % and parentheses; ValueError for any other."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        value = Fraction(str(node.value))
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        value = OPERATORS[type(node.op)](value_of(node.left), value_of(node.right))
    elif isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        value = OPERATORS[type(node.op)](value_of(node.operand))
    else:
        raise ValueError
    if abs(value) > LARGEST:
        raise ValueError
    return Fraction(value)


def calculate(expression):
    """The result as a text: a whole number, else with up to six decimals; "error" where there is none."""
    if len(expression) > LONGEST:
        return "error"
    try:
        value = value_of(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return "error"
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.6f}".rstrip("0").rstrip(".")


def find_call(text):
    """The expression that a message asks for; None: it is an answer."""
    if match := re.fullmatch(r"\s*\[([^\[\]]*)\]\s*", text):
        return match[1]
    if match := re.search(r"<tool_call>(.*?)</tool_call>", text, re.DOTALL):
        try:
            return str(json.loads(match[1])["arguments"]["expression"])
        except (ValueError, KeyError, TypeError):
            return ""
    return None


def is_right(text, answer):
    numbers = re.findall(r"-?\d+(?:\.\d+)?", text)
    try:
        return bool(numbers) and len(numbers[-1]) <= LONGEST and Fraction(numbers[-1]) == Fraction(answer)
    except (ValueError, TypeError):
        return False


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--role", default="tool", help="of the messages with results (default: tool)")
    parser.add_argument("--result", default="{}", help="their text, where {} is the number")
    options = parser.parse_args()
    for line in sys.stdin:
        request = json.loads(line)
        text = request["messages"][-1]["content"]
        expression = find_call(text)
        reply = {"id": request["id"]}
        if expression is not None and request["turns_left"] > 0:
            result = options.result.replace("{}", calculate(expression))
            reply["messages"] = [{"role": options.role, "content": result}]
        else:
            reply |= {"done": True, "reward": float(expression is None and is_right(text, request["answer"]))}
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
