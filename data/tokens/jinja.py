"""Renders chat templates as transformers.apply_chat_template does (5.24), for jinja.c, which starts it once.

Each line of standard input is a request in JSON, each line of standard output its reply, which is {"error": ...} if it
fails. The first request has the templates by name and the texts of special tokens; the others have a conversation.
Templates come with models and are not trusted: jinja2's sandbox holds them, and processor time and memory are limited.
"""
import sys
sys.path = [p for p in sys.path if p]  # no module of the current folder
import datetime, json, os, re, signal
try:
    import jinja2, jinja2.ext, jinja2.sandbox
except ImportError:
    sys.exit(3)
try:
    import resource
except ImportError:
    resource = None

LONGEST = 1 << 26  # characters of a text
REASONING = ("reasoning_content", "thinking", "reasoning")
TOKEN = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")


class Refused(Exception):
    pass


class Generation(jinja2.ext.Extension):
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

    def mark(self, caller):
        text = caller()
        marks.append((length, text))
        return text


class Dict:
    def __call__(self, *args, **kwargs):
        return dict(*args, **kwargs)

    def fromkeys(self, *args, **kwargs):
        return dict.fromkeys(*args, **kwargs)


class Namespace(jinja2.utils.Namespace):
    def __init__(*args, **kwargs):
        self, args = args[0], args[1:]
        attributes = dict(*args, **kwargs)
        for name in attributes:
            check_name(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name, value):
        check_name(name)
        jinja2.utils.Namespace.__setitem__(self, name, value)


def check_name(name):
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError("a namespace has no attributes that begin with _: %r" % name)


# All conversations have the time of the first one: a run across midnight has one day.
def now(form):
    global clock
    fixed = os.environ.get("SOURCE_DATE_EPOCH")
    if clock is None:
        clock = datetime.datetime.fromtimestamp(int(fixed), datetime.timezone.utc) if fixed else datetime.datetime.now()
    return clock.strftime(form)


def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def compile_template(text):
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = now
    environment.globals["dict"] = Dict()
    environment.globals["namespace"] = Namespace
    return environment.from_string(text)


def render(messages, generates=False):
    global length
    pieces, length = [], 0
    marks.clear()
    for piece in template.generate(messages=messages, tools=tools, documents=None, add_generation_prompt=generates,
                                   **variables):
        pieces.append(piece)
        length += len(piece)
        if length > LONGEST:
            raise Refused("its text has over %d characters" % LONGEST)
    return "".join(pieces)


def attempt(messages, generates=False):
    try:
        return render(messages, generates)
    except (MemoryError, Refused):
        raise
    except Exception:
        return None


# Characters that two texts have in common at their beginning; half a <token> does not count.
def common(a, b):
    n = 0
    for x, y in zip(a, b):
        if x != y:
            break
        n += 1
    if n == len(a):
        return n
    opening = a.rfind("<", 0, n)
    return opening if opening > a.rfind(">", 0, n) and TOKEN.match(a, opening) else n


# The texts before and behind the content of a message, found by two other contents; None if that fails.
def around(messages, i, generates=False):
    message = {key: value for key, value in messages[i].items() if key not in REASONING}
    contents = ["Vx1W", "Kx2J"]
    texts = [attempt(messages[:i] + [dict(message, content=c)] + messages[i + 1:], generates) for c in contents]
    if None in texts:
        return None, None
    n = 0
    while n < min(map(len, texts)) and texts[0][-1 - n] == texts[1][-1 - n]:
        n += 1
    ends = [text[:len(text) - n] for text in texts]
    if not all(end.endswith(c) for end, c in zip(ends, contents)):
        return None, None
    return ends[0][:-len(contents[0])], texts[0][len(texts[0]) - n:]


def behind(messages, i, generates=False):
    return around(messages, i, generates)[1]


def unclear(i, what):
    raise Refused("message %d: the template rewrites earlier turns, and the %s of this response in its text is not "
                  "clear; end the conversation with it, or mark responses with {%% generation %%} in the template" %
                  (i + 1, what))


# Where the first message is a response: behind the header that follows a message of the user, or the part of it that
# the template writes in conversations.
def first_of_all(messages, full):
    user = [{"role": "user", "content": "x"}]
    alone, prompt, before = attempt(user), attempt(user, True), around(messages, 0)[0]
    if None in (alone, prompt, before) or not prompt.startswith(alone):
        unclear(0, "beginning")
    header = prompt[len(alone):]
    at = before.rfind(header) if header else -1
    if at >= 0 and full.startswith(before[:at + len(header)]):
        return at + len(header)
    for n in range(len(header), 0, -1):
        if before.endswith(header[:n]) and TOKEN.search(header, 0, n) and full.startswith(before):
            return len(before)
    unclear(0, "beginning")


# Where response i begins: behind the text that the model gets to write it.
def first_of(messages, i, full):
    prompt = attempt(messages[:i], True)
    if prompt is not None and full.startswith(prompt):
        return len(prompt)
    if i == 0:
        return first_of_all(messages, full)
    if prompt is None:
        unclear(i, "beginning")
    base = attempt(messages[:i])
    if base is not None and prompt.startswith(base) and full.startswith(base):
        n = common(prompt, full)
        if n > len(base):
            return n
    given, whole = behind(messages[:i], i - 1, True), behind(messages, i - 1)
    if given is not None and whole is not None:
        n = common(given, whole)
        if n > 0 and full.endswith(whole[n:]):
            return len(full) - len(whole) + n
    unclear(i, "beginning")


# Where the turn of response i ends.
def end_of(messages, i, full):
    if i + 1 == len(messages):
        return len(full)
    through = attempt(messages[:i + 1])
    if through is not None and full.startswith(through):
        return len(through)
    alone, whole = behind(messages[:i + 1], i), behind(messages, i)
    if alone is None or whole is None:
        unclear(i, "end")
    n = common(alone, whole)
    if n < len(alone) and not TOKEN.search(alone, 0, n):
        # it ends with one token, and another one where it is the last
        last, token = TOKEN.fullmatch(alone.strip()), TOKEN.match(whole)
        n = token.end() if last and token else 0
    if n == 0 and alone or not full.endswith(whole[n:]):
        unclear(i, "end")
    return len(full) - len(whole) + n


# The visible end of a message's content, which its response has too.
def visible(message):
    content = message.get("content")
    if not isinstance(content, str) or "tool_calls" in message:
        return ""
    return content.split("</think>")[-1].strip()


# The message that each {% generation %} block belongs to: one block for each response, or only for the last ones, or
# as many as a response adds to the text.
def owners_of(messages, turns, blocks):
    count, added = len(blocks), []
    for i in turns if count > len(turns) else []:
        render(messages[:i + 1])
        added += [i] * (len(marks) - len(added))
    owners = added if count > len(turns) else turns[len(turns) - count:]
    texts = {i: "".join(text for (_, text), owner in zip(blocks, owners) if owner == i) for i in owners}
    if len(owners) != count or any(visible(messages[i]) not in text for i, text in texts.items()):
        raise Refused("the template's {% generation %} blocks are not those of its responses; it must write one for "
                      "each")
    return owners


def responses(messages, full, found):
    turns = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
    spans = []
    if is_marked:
        owners = owners_of(messages, turns, found)
        for (start, text), turn in zip(found, owners):
            if full[start:start + len(text)] != text:
                raise Refused("a {% generation %} block of the template stands in a macro or a captured block, where "
                              "its place in the text is not known")
            spans.append((start, start + len(text), turn))
        return spans
    for i in turns:
        start, end = first_of(messages, i, full), end_of(messages, i, full)
        if start > end or spans and start < spans[-1][1]:
            unclear(i, "beginning")
        if visible(messages[i]) not in full[start:end]:
            raise Refused("message %d: the template does not write the content of this response as it is" % (i + 1))
        spans.append((start, end, i))
    return spans


def plain(message):
    message = {key: value for key, value in message.items() if value is not None}
    reasoning = next((message[key] for key in REASONING if key in message), None)
    if reasoning is not None:
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message


def answer(request):
    global template, tools, variables, is_marked
    if "templates" in request:
        for name, text in request["templates"].items():
            templates[name] = compile_template(text), re.search(r"\{%-?\s*generation\s*-?%\}", text) is not None
        tokens.update(request["tokens"])
        return {}
    tools = request.get("tools")
    template, is_marked = templates["tool_use" if tools is not None and "tool_use" in templates else "default"]
    variables = {**tokens, **request.get("variables", {})}
    messages = [plain(message) for message in request["messages"]]
    full = render(messages, request["generates"])
    spans = [] if request["generates"] else responses(messages, full, list(marks))
    offsets, at, bytes_before = {}, 0, 0
    for place in sorted({p for span in spans for p in span[:2]}):
        bytes_before += len(full[at:place].encode())
        offsets[place], at = bytes_before, place
    full.encode()
    spans = [[offsets[start], offsets[end], turn] for start, end, turn in spans]
    return {"text": full, "spans": spans, "is_marked": is_marked}


def place_of(error):
    line, trace = getattr(error, "lineno", None), error.__traceback__
    while trace:
        if trace.tb_frame.f_code.co_filename in ("<template>", "<unknown>"):
            line = trace.tb_lineno
        trace = trace.tb_next
    return "line %d of the template: " % line if line else ""


def main():
    for name, most in (("RLIMIT_AS", 4 << 30), ("RLIMIT_CORE", 0), ("RLIMIT_FSIZE", 0)):
        try:
            resource.setrlimit(getattr(resource, name), (most, most))
        except (AttributeError, OSError, ValueError):
            pass  # not on this system
    sys.setrecursionlimit(2000)
    seconds = float(sys.argv[1])
    sys.stdout.buffer.write(b"\n")  # jinja2 is there
    sys.stdout.buffer.flush()
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, seconds)  # a rendering that never ends is ended
        try:
            reply = answer(json.loads(line))
        except Refused as error:
            reply = {"error": str(error)}
        except jinja2.exceptions.TemplateError as error:
            kind = type(error).__name__
            reply = {"error": place_of(error) + ("" if kind == "TemplateError" else kind + ": ") + str(error)}
        except Exception as error:
            reply = {"error": place_of(error) + type(error).__name__ + ": " + str(error)}
        signal.setitimer(signal.ITIMER_PROF, 0)
        if "error" in reply:
            reply["error"] = reply["error"].encode(errors="replace").decode()[:2000]
        sys.stdout.buffer.write(json.dumps(reply, ensure_ascii=False).encode() + b"\n")
        sys.stdout.buffer.flush()


templates, tokens, marks, length, clock = {}, {}, [], 0, None
main()
