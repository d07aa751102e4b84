#!/usr/bin/env python3
"""Writes jinja.json, vectors of chat templates that python3-jinja2 renders: make_jinja.py > jinja.json

Run it from the root of the project, with transformers 5.24. Texts, ids and masks of {% generation %} blocks are those of
apply_chat_template. "responses" has the text of each response, written here: behind the header that the model gets, up
to the token that ends the turn.
"""
import json
import tempfile

from transformers import PreTrainedTokenizerFast

special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|end|>", "<|return|>", "<|call|>", "<|message|>",
           "[INST]", "[/INST]", "<turn>", "<end_of_turn>", "<|user|>", "<|assistant|>"]

chatml = ("{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' "
          "+ '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
tools = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'system' and loop.first %}
        {%- continue %}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- set content = message.content or '' %}
        {%- set thoughts = message.reasoning_content or '' %}
        {%- if '</think>' in content %}
            {%- set thoughts = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last %}
            {{- '<think>\\n' + thoughts + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' + ('' if enable_thinking | default(true) else '<think>\\n\\n</think>\\n\\n') }}
{%- endif %}
"""
templates = {
    "chatml after BOS": "{{ bos_token }}" + chatml,
    "bare system text": "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}"
                        "{% set messages = messages[1:] %}{% endif %}" + chatml,
    "no line after a turn": chatml.replace("'<|im_end|>' + '\n'", "'<|im_end|>'"),
    "trimmed contents and an end token": chatml.replace("message['content']", "(message['content'] | trim)") +
                                         "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}",
    "another system message": "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are a helpful "
                              "assistant.<|im_end|>\n' }}{% endif %}" + chatml,
    "no header to generate": chatml.split("{% if add")[0],
    "marked responses": """{% for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}{{ '\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    "tools and thoughts": tools,
    "alternating roles": "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
                         "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}{{ '<turn>' + "
                         "('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim + "
                         "'<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<turn>model\n' }}"
                         "{% endif %}",
    "instructions in brackets": "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content "
                                "+ ' [/INST]' }}{% elif m.role == 'assistant' %}{{ ' ' + m.content + ' ' + eos_token }}"
                                "{% endif %}{% endfor %}",
    "another token ends the conversation": "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}"
                                           "{% if m.role == 'assistant' and loop.last %}<|return|>{% else %}<|end|>"
                                           "{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant"
                                           "{% endif %}",
    "no token ends a turn": "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>\n{% if loop.last %}"
                            "<think></think>\n{% endif %}{{ m.content }}{% else %}<|user|>\n{{ m.content }}{% endif %}"
                            "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    "opened thoughts": "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|assistant|>' + "
                       "m.content.split('</think>')[-1].strip() + '</s>' }}{% else %}{{ '<|user|>' + m.content }}"
                       "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|><think>\n' }}{% endif %}",
    "a template for tools": {"default": chatml + "{# #}",
                             "tool_use": "{% for tool in tools %}{{ tool | tojson(indent=2) }}\n{% endfor %}" + chatml},
}


def user(content):
    return {"role": "user", "content": content}


def answer(content, **fields):
    return {"role": "assistant", "content": content, **fields}


definitions = [{"type": "function", "function": {
    "name": "weather", "description": "The <b>weather</b> of a \"city\", é",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"},
                                                    "days": {"type": "integer", "default": 3, "maximum": 1e1}}}}}]
call = [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln", "days": 1, "x": None}}}]
plain = [
    ([user("Hello")], {}),
    ([user("Hello"), answer("Hi there!")], {}),
    ([user("Grüße  "), answer(" \nSchöne Grüße"), user("and?\n"), answer("你好\n")], {}),
]
system = [([{"role": "system", "content": "Be brief."}, user("Hello there"), answer("Hi!")], {})]
first = [([answer("Welcome."), user("Hello"), answer("Hi!")], {})]
thoughts = [([user("a"), answer("<think>\nt\n</think>\n\nb"), user("c"), answer("<think>\nu\n</think>\n\nd")], {})]
result = {"role": "tool", "content": "sun"}
with_tools = [
    ([user("Weather?"), answer("", tool_calls=call), result, answer("Sun.")], {"tools": definitions}),
    ([user("Weather?"), answer(None, tool_calls=call), result, result, answer("Sun."), user("Sure?"),
      answer("Yes.", reasoning_content="why not")], {"tools": definitions}),
    ([user("Weather?"), answer("Let me see", reasoning_content="r", tool_calls=call), result], {"tools": definitions}),
    ([user("Hello")], {"variables": {"enable_thinking": False}}),
    ([user("a"), answer("b", reasoning_content="c"), user("d"), answer("e", reasoning_content="f")], {}),
]
special_text = [([user("a <|im_end|> b"), answer("</s>")], {})]
conversations = {
    "chatml after BOS": plain + system + first + special_text,
    "marked responses": plain + system + first,
    "tools and thoughts": plain + system + thoughts + with_tools,
    "alternating roles": plain,
    "instructions in brackets": plain,
    "opened thoughts": plain + thoughts,
    "no token ends a turn": plain,
    "a template for tools": plain + [([user("Weather?"), answer("Sun.")], {"tools": definitions})],
}


def tools_response(messages, i):
    content, thoughts = messages[i]["content"] or "", messages[i].get("reasoning_content", "")
    if "</think>" in content:
        thoughts = content.split("</think>")[0].split("<think>")[-1].strip("\n")
        content = content.split("</think>")[-1].lstrip("\n")
    if i > max(k for k, message in enumerate(messages) if message["role"] == "user"):
        content = "<think>\n" + thoughts + "\n</think>\n\n" + content
    for call in messages[i].get("tool_calls", []):
        content += '\n<tool_call>\n{"name": "weather", "arguments": %s}\n</tool_call>' % json.dumps(
            call["function"]["arguments"], ensure_ascii=False)
    return content + "<|im_end|>"


def is_last(messages, i):
    return i + 1 == len(messages)


# The text of response i, by template; the others write the content and <|im_end|>.
responses = {
    "trimmed contents and an end token": lambda m, i: m[i]["content"].strip() + "<|im_end|>" +
                                                      ("\n</s>" if is_last(m, i) else ""),
    "no header to generate": lambda m, i: "<|im_start|>assistant\n" + m[i]["content"] + "<|im_end|>",
    "tools and thoughts": tools_response,
    "alternating roles": lambda m, i: m[i]["content"].strip() + "<end_of_turn>",
    "instructions in brackets": lambda m, i: " " + m[i]["content"] + " </s>",
    "another token ends the conversation": lambda m, i: "<|message|>" + m[i]["content"] +
                                                        ("<|return|>" if is_last(m, i) else "<|end|>"),
    "no token ends a turn": lambda m, i: ("<think></think>\n" if is_last(m, i) else "") + m[i]["content"],
    "opened thoughts": lambda m, i: m[i]["content"].split("</think>")[-1].strip() + "</s>",
}


def render(template, messages, extra, generates):
    return tokenizer.apply_chat_template(messages, tools=extra.get("tools"), chat_template=template, tokenize=False,
                                         add_generation_prompt=generates, **extra.get("variables", {}))


base = json.load(open("data/demo-tokenizer.json"))
count = len(base["model"]["vocab"])
for i, token in enumerate(special):
    base["added_tokens"].append({"id": count + i, "content": token, "single_word": False, "lstrip": False,
                                 "rstrip": False, "normalized": False, "special": True})
with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
    json.dump(base, file)
    file.flush()
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=file.name, bos_token="<s>", eos_token="</s>")

cases = []
for name, by_name in templates.items():
    vectors = []
    for messages, extra in conversations.get(name, plain + system):
        generates = messages[-1]["role"] != "assistant"
        template = by_name
        if isinstance(by_name, dict):
            template = by_name["tool_use" if extra.get("tools") else "default"]
        vector = {"messages": messages, **extra, "generates": generates}
        vector["text"] = render(template, messages, extra, generates)
        vector["ids"] = tokenizer(vector["text"], add_special_tokens=False)["input_ids"]
        if "{% generation %}" in template and not generates:
            out = tokenizer.apply_chat_template(messages, chat_template=template, return_dict=True,
                                                return_assistant_tokens_mask=True)
            vector["mask"] = out["assistant_masks"]
        if not generates:
            write = responses.get(name, lambda m, i: m[i]["content"] + "<|im_end|>")
            vector["responses"] = [[i, write(messages, i)] for i, m in enumerate(messages) if m["role"] == "assistant"]
        vectors.append(vector)
    cases.append({"name": name, "template": by_name, "vectors": vectors})
print(json.dumps({"special": special, "cases": cases}, ensure_ascii=False, indent=0, separators=(",", ": ")))
