"""Checks a server of infer --serve: python3 serve_check.py PORT CHECK [ARGUMENT...]. Needs Python's library alone.

Each check is a function; it prints nothing and ends with 0, or says what differs.
"""

import http.client
import json
import os
import random
import re
import selectors
import socket
import struct
import subprocess
import sys
import threading
import time

PORT = 0
WAIT = 300  # seconds after which something hangs, on any machine


def call(method, path, body=None, headers=None, connection=None):
    """Status and text of an answer."""
    own = connection or http.client.HTTPConnection("127.0.0.1", PORT, timeout=WAIT)
    data = None if body is None else body if isinstance(body, (bytes, str)) else json.dumps(body)
    own.request(method, path, data, headers or {})
    answer = own.getresponse()
    text = answer.read().decode()
    if not connection:
        own.close()
    return answer.status, text


def post(path, body, **more):
    status, text = call("POST", path, body, **more)
    return status, json.loads(text)


def complete(**fields):
    status, answer = post("/v1/completions", fields)
    assert status == 200, (status, answer)
    return answer


def events(path, body):
    """The events of a stream; the last one must be [DONE]."""
    status, text = call("POST", path, dict(body, stream=True))
    assert status == 200, text
    parts = text.split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""], parts[-3:]
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


def drafts_are_counted():
    drafted, accepted = (metric("megatron_%s_tokens_total" % kind) for kind in ("drafted", "accepted"))
    assert 0 < accepted <= drafted, (accepted, drafted)


def metric(name):
    for line in call("GET", "/metrics")[1].split("\n"):
        if line.startswith(name + " "):
            return float(line.split()[-1])
    raise AssertionError("no metric " + name)


def in_threads(count, work):
    """Runs work(number) in as many threads; an exception of one is the caller's."""
    failures = []

    def run(number):
        try:
            work(number)
        except Exception as failure:  # pylint: disable=broad-except
            failures.append((number, repr(failure)))

    threads = [threading.Thread(target=run, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[:3]


def await_idle():
    end = time.time() + WAIT
    while metric("megatron_requests_running") + metric("megatron_requests_waiting") > 0:
        assert time.time() < end, "requests still run"
        time.sleep(0.05)


PROMPTS = [[72, 101, 108], [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22], [1], [72, 101, 9, 9]]


def lists_the_model(name):
    status, text = call("GET", "/v1/models")
    assert status == 200 and [m["id"] for m in json.loads(text)["data"]] == [name], text
    assert call("GET", "/v1/models/" + name)[0] == 200 and call("GET", "/v1/models/other")[0] == 404
    assert json.loads(call("GET", "/health")[1]) == {"status": "ok"}


def greedy_is_infers_whatever_else_runs(path):
    """The file has a line of tokens of `infer` for each of PROMPTS. Meanwhile others sample, stream, score and leave."""
    wanted = [[int(t) for t in line.split()] for line in open(path, encoding="ascii")]
    stop = threading.Event()

    def disturb(number):
        chance = random.Random(number)
        while not stop.is_set():
            body = {"prompt": [chance.randrange(3, 150) for _ in range(chance.randrange(1, 30))],
                    "max_tokens": chance.randrange(1, 30), "temperature": 1.5, "n": chance.randrange(1, 4)}
            body.update([{}, {"logprobs": 3}, {"top_k": 5, "top_p": 0.9}, {"echo": True, "logprobs": 1},
                         {"repetition_penalty": 1.3}][chance.randrange(5)])
            status, text = call("POST", "/v1/completions", dict(body, stream=chance.random() < 0.5))
            assert status == 200, text

    others = [threading.Thread(target=disturb, args=(n,)) for n in range(4)]
    for other in others:
        other.start()
    try:
        def ask(number):
            for more in ({}, {"logprobs": 2}, {"n": 2}):
                fields = dict(prompt=PROMPTS[number % 4], max_tokens=24, temperature=0, return_token_ids=True, **more)
                for choice in complete(**fields)["choices"]:
                    assert choice["token_ids"] == wanted[number % 4], (number, more, choice)

        in_threads(8, ask)
        answer = complete(prompt=PROMPTS, max_tokens=24, temperature=0, return_token_ids=True)
        assert [choice["token_ids"] for choice in answer["choices"]] == wanted
    finally:
        stop.set()
        for other in others:
            other.join()


def seeds_draw_infers_samples(path):
    """Lines of `infer --seed 7 --num-return-sequences 3`: the choices of a request with this seed, at any time."""
    wanted = [[int(t) for t in line.split()] for line in open(path, encoding="ascii")]
    for _ in range(2):
        answer = complete(prompt=PROMPTS[0], max_tokens=16, n=3, seed=7, temperature=1, return_token_ids=True)
        assert [choice["token_ids"] for choice in answer["choices"]] == wanted
    others = [complete(prompt=PROMPTS[0], max_tokens=16, temperature=1, return_token_ids=True) for _ in range(2)]
    assert others[0]["choices"][0]["token_ids"] != others[1]["choices"][0]["token_ids"]  # no seed: always another


def scores_are_those_of_infer(tokens, logps, length, tolerance):
    """Sequences of length + 1 tokens, and the log-probabilities of `infer --score`; all sequences at once."""
    length = int(length)
    ids = open(tokens, "rb").read()
    ids = list(struct.unpack("<%di" % (len(ids) // 4), ids))
    wanted = open(logps, "rb").read()
    wanted = list(struct.unpack("<%df" % (len(wanted) // 4), wanted))
    count = len(wanted) // length

    def ask(number):
        prompt = ids[number * (length + 1):(number + 1) * (length + 1)]
        for more in ({"max_tokens": 0}, {"max_tokens": 1}):
            choice = complete(prompt=prompt, echo=True, logprobs=2, temperature=0, **more)["choices"][0]
            scores = choice["logprobs"]
            assert scores["token_logprobs"][0] is None and len(scores["tokens"]) == length + 1 + more["max_tokens"]
            for place in range(1, length + 1):
                distance = abs(scores["token_logprobs"][place] - wanted[number * length + place - 1])
                assert distance <= float(tolerance), (number, place, distance)
                top = scores["top_logprobs"][place]
                assert abs(top[scores["tokens"][place]] - scores["token_logprobs"][place]) < 1e-6
                assert max(top.values()) >= scores["token_logprobs"][place] and 2 <= len(top) <= 3

    in_threads(count, ask)


def streams_are_the_whole_answers():
    for more in ({}, {"n": 3, "seed": 5, "temperature": 1}, {"logprobs": 2}, {"echo": True, "logprobs": 1},
                 {"stop": "\u0013"}):
        body = dict({"prompt": "Hello, stream", "max_tokens": 20, "temperature": 0, "seed": 5}, **more)
        whole = complete(**body)["choices"]
        text = [""] * len(whole)
        ends, logps = [None] * len(whole), [[] for _ in whole]
        for event in events("/v1/completions", body):
            choice = event["choices"][0]
            at = choice["index"]
            assert ends[at] is None
            text[at] += choice["text"]
            ends[at] = choice["finish_reason"]
            if choice["logprobs"]:
                logps[at] += choice["logprobs"]["token_logprobs"]
        assert text == [c["text"] for c in whole], (more, text, whole)
        assert ends == [c["finish_reason"] for c in whole]
        for at, choice in enumerate(whole):
            if choice["logprobs"]:
                pairs = list(zip(logps[at], choice["logprobs"]["token_logprobs"]))
                assert len(logps[at]) == len(choice["logprobs"]["token_logprobs"])
                assert all(a is b is None or abs(a - b) < 1e-5 for a, b in pairs), pairs
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9, "temperature": 0}
    status, whole = post("/v1/chat/completions", body)
    parts = events("/v1/chat/completions", dict(body, stream_options={"include_usage": True}))
    assert status == 200 and parts[0]["choices"][0]["delta"]["role"] == "assistant"
    text = "".join(c["delta"].get("content", "") for part in parts for c in part["choices"])
    assert text == whole["choices"][0]["message"]["content"] and parts[-1]["usage"] == whole["usage"]


def stops_cut_the_text():
    body = {"prompt": "Hello", "max_tokens": 30, "temperature": 0}
    text = complete(**body)["choices"][0]["text"]
    stop = next(text[i:i + 2] for i in range(4, 20) if text.find(text[i:i + 2]) == i and "\ufffd" not in text[i:i + 2])
    for stream in (False, True):
        for stops in (stop, ["never there", stop]):
            if stream:
                parts = [e["choices"][0] for e in events("/v1/completions", dict(body, stop=stops))]
                found, reason = "".join(p["text"] for p in parts), parts[-1]["finish_reason"]
            else:
                choice = complete(stop=stops, **body)["choices"][0]
                found, reason = choice["text"], choice["finish_reason"]
            assert found == text[:text.index(stop)] and reason == "stop", (found, text, stop)


def wrong_requests_are_refused_in_one_sentence():
    def refused(status, body, parameter=None, path="/v1/completions", method="POST", headers=None):
        got, text = call(method, path, body, headers)
        assert got == status, (body, got, text)
        error = json.loads(text)["error"]
        assert set(error) == {"message", "type", "param", "code"} and "\n" not in error["message"], text
        assert error["param"] == parameter and error["message"], (body, text)

    for body in (b"", b"{", b"[]", b"nonsense", b'{"prompt": "\xff"}', b'{"prompt": "a", "prompt": "b"}',
                 b"[" * 5000, b'{"prompt":' + b"[" * 5000, {"prompt": "a", "unknown": 1}):
        refused(400, body)
    for field, values in {"prompt": [None, 1, {}, "", [], [[]], [[1], 2, "a"], [1.5], [-1], [160], [1] * 65,
                                     ["a"] * 129, [None], [[[1]]]],
                          "max_tokens": [-1, 1.5, "1", 64, 1 << 40, 0], "temperature": [-1, "1", 1e9],
                          "top_p": [0, 2], "top_k": [-2, 0.5], "min_p": [-1], "n": [0, 129, "2"], "seed": ["a", 1.5],
                          "logprobs": [-1, 21, True], "stop": ["", 1, [""], [1], ["a"] * 17, "a" * 2000],
                          "stream": [1, "true"], "echo": [1], "logit_bias": [{"5": 1}], "suffix": ["x"],
                          "frequency_penalty": [0.5], "best_of": [2], "model": [5],
                          "stream_options": [{"include_usage": True}]}.items():
        for value in values:
            refused(400, {"prompt": "a", **{field: value}}, field)
    refused(404, {"prompt": "a", "model": "other"}, "model")
    for messages in (None, [], "a", [{}], [{"role": "user", "content": 1}],
                     [{"role": "user", "content": [{"type": "image_url"}]}], [{"role": "nobody", "content": "a"}]):
        refused(400, {"messages": messages}, "messages", "/v1/chat/completions")
    talk = [{"role": "user", "content": "a"}]
    for field, value in (("tools", [{}]), ("tool_choice", "required"), ("top_logprobs", 2),
                         ("response_format", {"type": "json_object"})):
        refused(400, {"messages": talk, field: value}, field, "/v1/chat/completions")
    refused(404, {}, None, "/nothing")
    refused(404, None, None, "/../../etc/passwd", "GET")
    refused(405, None, None, "/v1/completions", "GET")
    refused(400, {}, "prompt", "/tokenize")
    for host in "elsewhere.example", "localhost.example", "127.0.0.1.example", "[::1].example", "":
        refused(403, {"prompt": "a"}, headers={"Host": host})
    for host in "LocalHost", "localhost:80", "127.0.0.2:80", "127.1.2.3", "[::1]:80":
        assert http_headers("GET", "/health", {"Host": host})[0] == 200, host
    refused(415, {"prompt": "a"}, headers={"Content-Encoding": "gzip"})
    both = {"Content-Length": "5", "Transfer-Encoding": "chunked"}  # some versions of the library refuse it themselves
    assert call("POST", "/v1/completions", b"0\r\n\r\n", both)[0] == 400
    for body, parameter in (({"prompt": "a", "unknown": 1}, None), ({"prompt": "a", "messages": talk}, "prompt"),
                            ({"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
                            ({"prompt": ["a"]}, "prompt")):
        refused(400, body, parameter, "/tokenize")
    refused(404, {"prompt": "a", "model": "other"}, "model", "/tokenize")
    refused(403, {"prompt": "a"}, headers={"Origin": "https://elsewhere.example"})
    refused(413, b" " * 70000)
    assert "Access-Control-Allow-Origin" not in str(http_headers("GET", "/health"))
    assert complete(prompt="still there", max_tokens=1)["usage"]["completion_tokens"] == 1


def http_headers(method, path, headers=None):
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=WAIT)
    connection.request(method, path, None, headers or {})
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return answer.status, dict(answer.getheaders())


def tokens_are_those_of_the_tokenizer():
    assert post("/tokenize", {"prompt": "Hello"})[1]["tokens"] == [72, 101, 108, 108, 111]
    talk = [{"role": "user", "content": "Hi"}]
    assert post("/tokenize", {"messages": talk})[1]["tokens"] == [72, 105]


def keys_open(key, origin):
    for given, status in ((None, 401), ("Bearer " + key[:-1], 401), ("Bearer " + key + "x", 401), ("Bearer ", 401),
                          (key, 401), ("Bearer " + key, 200)):
        headers = {"Authorization": given} if given else {}
        assert call("POST", "/v1/completions", {"prompt": "a", "max_tokens": 1}, headers)[0] == status, given
        assert call("GET", "/metrics", None, headers)[0] == status
        assert call("GET", "/health", None, headers)[0] == 200
    status, headers = http_headers("OPTIONS", "/v1/completions", {"Origin": origin})
    assert status == 204 and headers["Access-Control-Allow-Origin"] == origin
    status, headers = http_headers("GET", "/v1/models", {"Origin": origin, "Authorization": "Bearer " + key})
    assert status == 200 and headers["Access-Control-Allow-Origin"] == origin
    assert http_headers("GET", "/health", {"Origin": "https://elsewhere.example"})[0] == 403


def raw(data, reads=True):
    """Sends bytes; the answer, or as much as there is before the server closes."""
    with socket.create_connection(("127.0.0.1", PORT), WAIT) as connection:
        connection.sendall(data)
        got = b""
        try:
            while reads and (part := connection.recv(4096)):
                got += part
                if b"\r\n\r\n" in got:
                    break
        except ConnectionError:
            pass
        return got


def request_bytes(body, length=None):
    text = json.dumps(body).encode()
    return (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" %
            (len(text) if length is None else length)) + text


def clients_that_leave_are_cancelled():
    long = {"prompt": "a", "max_tokens": 60, "n": 100, "temperature": 1}
    for stream in (True, False):
        for _ in range(6):
            raw(request_bytes(dict(long, stream=stream)), reads=stream)
    await_idle()
    assert 'status="499"' in call("GET", "/metrics")[1]
    assert complete(prompt="still there", max_tokens=1)


def garbage_harms_nobody():
    chance = random.Random(1)
    for number in range(60):
        kind = number % 6
        if kind == 0:
            raw(bytes(chance.randrange(256) for _ in range(200)) + b"\r\n\r\n")
        elif kind == 1:  # halves
            whole = request_bytes({"prompt": "abc", "max_tokens": 3})
            raw(whole[:chance.randrange(1, len(whole) - 1)], reads=False)
        elif kind == 2:
            raw(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n{}")
        elif kind == 3:
            raw(b"GET /" + b"a" * 100000 + b" HTTP/1.1\r\n\r\n")
        elif kind == 4:
            raw(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n")
        else:  # a body longer than it says
            raw(request_bytes({"prompt": "abc", "max_tokens": 2}, 3))
    with socket.create_connection(("127.0.0.1", PORT), WAIT) as slow:  # a byte at a time is an ordinary request
        for byte in request_bytes({"prompt": "abc", "max_tokens": 2}):
            slow.sendall(bytes([byte]))
        assert b"200 OK" in slow.recv(4096)
    await_idle()
    assert complete(prompt="still there", max_tokens=1)


def process_state(pid):
    files = len(os.listdir("/proc/%s/fd" % pid))
    pages = int(open("/proc/%s/statm" % pid, encoding="ascii").read().split()[1])
    return files, pages * os.sysconf("SC_PAGE_SIZE")


def misbehave(chance, body, kept):
    """One of the ways in which clients go wrong; connections in `kept` stay open until the end of a round."""
    whole = request_bytes(dict(body, stream=chance.random() < 0.5))
    kind = chance.randrange(8)
    try:
        if kind == 0:  # leaves after its request
            raw(whole, reads=False)
        elif kind == 1:  # leaves in the answer
            with socket.create_connection(("127.0.0.1", PORT), WAIT) as connection:
                connection.sendall(request_bytes(dict(body, stream=True, max_tokens=20)))
                connection.recv(chance.randrange(1, 200))
        elif kind == 2:  # dribbles, and gets its answer all the same
            with socket.create_connection(("127.0.0.1", PORT), WAIT) as connection:
                for at in range(0, len(whole), 16):
                    connection.sendall(whole[at:at + 16])
                    time.sleep(0.001)
                assert connection.recv(4096).split(b" ")[1] in (b"200", b"429")
        elif kind == 3:
            raw(bytes(chance.randrange(256) for _ in range(chance.randrange(1, 400))) + b"\r\n\r\n")
        elif kind == 4:  # half a request
            raw(whole[:chance.randrange(1, len(whole) - 1)], reads=False)
        elif kind == 5:  # half a request of a client that stays
            kept.append(socket.create_connection(("127.0.0.1", PORT), WAIT))
            kept[-1].sendall(whole[:chance.randrange(1, len(whole) - 1)])
        elif kind == 6:  # another length than the body has
            raw(request_bytes(body, chance.randrange(0, 30)))
        else:  # a body of nonsense
            text = bytes(chance.randrange(256) for _ in range(chance.randrange(1, 3000)))
            status, _ = call("POST", "/v1/completions", text)
            assert status == 400, status
    except ConnectionError:
        pass  # it may close on nonsense


def holds_under_fire(requests, clients, pid):
    """Many requests of many sizes for several models, by many clients at once, whole or as streams: each answer is
    complete and the right one. In between clients misbehave. Afterwards the process has as many files as before, and
    the second half of the requests has taken no more memory."""
    requests, clients = int(requests), int(clients)
    chance = random.Random(3)
    models = [model["id"] for model in json.loads(call("GET", "/v1/models")[1])["data"]]
    prompts = [[chance.randrange(3, 150) for _ in range(chance.randrange(1, 40))] for _ in range(30)]
    wanted = {(model, at): complete(model=model, prompt=prompt, max_tokens=20, temperature=0,
                                    return_token_ids=True)["choices"][0]["token_ids"]
              for at, prompt in enumerate(prompts) for model in models}
    watches = os.path.isdir("/proc/%s/fd" % pid)
    answered, refused = [0] * clients, [0] * clients

    def fire(number, count, part, kept):
        own = random.Random(number * 10 + part)
        connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=WAIT)
        for _ in range(count):
            at, model, length = own.randrange(len(prompts)), own.choice(models), own.randrange(1, 21)
            body = {"model": model, "prompt": prompts[at], "max_tokens": length, "temperature": 0,
                    "return_token_ids": True, "stream": own.random() < 0.2, "n": own.choice((1, 1, 1, 2))}
            if own.random() < 0.1:
                body["logprobs"] = 2
            if own.random() < 0.15:
                misbehave(own, body, kept)
            while True:
                status, text = call("POST", "/v1/completions", body, connection=connection)
                if status != 429:
                    break
                refused[number] += 1
                time.sleep(0.02)
            assert status == 200, (status, text)
            got = [[] for _ in range(body["n"])]
            if body["stream"]:
                parts = text.split("\n\n")
                assert parts[-2:] == ["data: [DONE]", ""], parts[-3:]
                for event in parts[:-2]:
                    choice = json.loads(event.removeprefix("data: "))["choices"][0]
                    got[choice["index"]] += choice["token_ids"]
            else:
                answer = json.loads(text)
                assert answer["model"] == model, answer
                got = [choice["token_ids"] for choice in answer["choices"]]
            assert got == [wanted[model, at][:length]] * body["n"], (model, at, length, got)
            answered[number] += 1
        connection.close()

    rounds, counts = [], [requests // 10 // clients, requests * 4 // 10 // clients, requests // 2 // clients]
    files = process_state(pid)[0] if watches else 0
    for part, count in enumerate(counts):
        kept = []
        in_threads(clients, lambda number, part=part, count=count, kept=kept: fire(number, count, part, kept))
        for connection in kept:
            connection.close()
        await_idle()
        rounds.append(process_state(pid)[1] >> 10 if watches else 0)
    assert sum(answered) == sum(counts) * clients
    end = time.time() + WAIT
    while watches and process_state(pid)[0] > files + 1:
        assert time.time() < end, "files stay open: %r" % (process_state(pid),)
        time.sleep(0.05)
    print("%d clients: %d answers, all right; %d refusals by a full queue; KiB of memory after each part: %s" %
          (clients, sum(answered), sum(refused), rounds))
    assert rounds[2] - max(rounds[:2]) < 8 << 10, "memory grows: %r KiB" % rounds
    assert complete(prompt="still there", max_tokens=1)


def prompts_are_read_in_parts(most):
    """No step reads more tokens of prompts than --max-prefill-tokens, however few sequences run."""
    steps = metric("megatron_step_seconds_count")
    complete(prompt=[9 + i % 50 for i in range(60)], max_tokens=1)
    await_idle()
    steps = metric("megatron_step_seconds_count") - steps
    assert steps >= 60 / int(most), steps


def full_queues_refuse():
    """A server with --serve-queue 2 --inference-max-requests 1 --serve-timeout 1."""
    statuses = []

    def ask(_):
        body = {"prompt": "a", "max_tokens": 60, "n": 128, "temperature": 1}
        statuses.append(call("POST", "/v1/completions", body)[0])

    in_threads(12, ask)
    assert set(statuses) <= {200, 429, 504} and 429 in statuses, statuses
    assert complete(prompt="a", max_tokens=1)


def late_requests_end():
    """A server with --serve-timeout 1: requests for many seconds of work end, some with 504."""
    found = threading.Event()

    def ask(_):
        body = {"prompt": "a", "max_tokens": 60, "n": 128, "temperature": 1}
        for _ in range(100):
            if found.is_set():
                return
            if call("POST", "/v1/completions", body)[0] == 504:
                found.set()

    in_threads(40, ask)
    assert found.is_set()


def ends_after_its_work(pid):
    """SIGTERM in a stream: the stream is whole, and new requests are refused."""
    body = {"prompt": "a", "max_tokens": 60, "n": 128, "temperature": 1, "stream": True}
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=WAIT)
    connection.request("POST", "/v1/completions", json.dumps(body))
    answer = connection.getresponse()
    first = answer.read(100)
    os.kill(int(pid), 15)
    end = time.time() + WAIT
    try:
        while call("POST", "/v1/completions", {"prompt": "a", "max_tokens": 1})[0] != 503:
            assert time.time() < end
    except ConnectionError:
        pass
    text = (first + answer.read()).decode()
    assert text.endswith("data: [DONE]\n\n") and text.count('"finish_reason":"length"') + \
        text.count('"finish_reason":"stop"') == 128


def greedy(path):
    """The file has a line of tokens of `infer` on one rank for each of PROMPTS; sampled ones run meanwhile."""
    wanted = [[int(t) for t in line.split()] for line in open(path, encoding="ascii")]

    def ask(number):
        body = {"prompt": PROMPTS[number % 4], "max_tokens": 24, "temperature": number // 4, "return_token_ids": True}
        if number % 3 == 0:
            body.update(logprobs=1, echo=True)
        choice = complete(**body)["choices"][0]
        got = choice["token_ids"][len(PROMPTS[number % 4]) if number % 3 == 0 else 0:]
        assert number >= 4 or got == wanted[number], (number, got, wanted[number])

    in_threads(8, ask)


def adapters_answer_as_alone(path):
    """The file has a line NAME TOKENS... for each of PROMPTS and each model, the base first. All are asked at once, with
    the same prompts, also as streams; others sample meanwhile."""
    wanted = {}
    for line in open(path, encoding="ascii"):
        name, *tokens = line.split()
        wanted.setdefault(name, []).append([int(t) for t in tokens])
    names = list(wanted)
    listed = json.loads(call("GET", "/v1/models")[1])["data"]
    assert [model["id"] for model in listed] == names, listed
    assert [model.get("parent") for model in listed] == [None] + [names[0]] * (len(names) - 1)
    assert len({tuple(wanted[name][1]) for name in names}) == len(names), "the models give the same answers"
    for name in names:
        assert json.loads(call("GET", "/v1/models/" + name)[1])["id"] == name

    def ask(number):
        name, at = names[number % len(names)], number // len(names) % len(PROMPTS)
        body = {"model": name, "prompt": PROMPTS[at], "max_tokens": 24, "temperature": 0, "return_token_ids": True}
        if number >= 2 * len(names) * len(PROMPTS):
            status, answer = post("/v1/completions", dict(body, temperature=2, n=2))
            assert status == 200 and answer["model"] == name, answer
        elif number >= len(names) * len(PROMPTS):
            parts = events("/v1/completions", body)
            assert {part["model"] for part in parts} == {name}
            got = [token for part in parts for token in part["choices"][0]["token_ids"]]
            assert got == wanted[name][at], (name, at, got, wanted[name][at])
        else:
            status, answer = post("/v1/completions", dict(body, **({"logprobs": 1} if number % 3 else {})))
            assert status == 200 and answer["model"] == name, answer
            got = answer["choices"][0]["token_ids"]
            assert got == wanted[name][at], (name, at, got, wanted[name][at])

    in_threads(3 * len(names) * len(PROMPTS), ask)
    status, text = call("POST", "/v1/completions", {"model": "other", "prompt": "a"})
    assert status == 404 and json.loads(text)["error"]["code"] == "model_not_found", text
    assert call("GET", "/v1/models/other")[0] == 404


def processor_seconds(pid):
    fields = open("/proc/%s/stat" % pid, encoding="ascii").read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rate(prompts, tokens, pid):
    """Tokens per second of one client for each prompt, all at once, and the server's processor seconds per 1000 tokens;
    the prompts themselves were read before."""
    connections = [http.client.HTTPConnection("127.0.0.1", PORT, timeout=WAIT) for _ in prompts]
    counts = [0] * len(prompts)

    def ask(number, wanted):
        body = {"prompt": prompts[number], "max_tokens": wanted, "temperature": 0}
        status, text = call("POST", "/v1/completions", body, connection=connections[number])
        assert status == 200, text
        counts[number] = json.loads(text)["usage"]["completion_tokens"]

    in_threads(len(prompts), lambda number: ask(number, 1))
    start, used = time.time(), processor_seconds(pid)
    in_threads(len(prompts), lambda number: ask(number, tokens))
    seconds, used = time.time() - start, processor_seconds(pid) - used
    for connection in connections:
        connection.close()
    return sum(counts) / seconds, 1000 * used / sum(counts)


def rates(path, tokens, rounds, pid, *infer):
    """In turn: the server for a client a prompt, and infer --prompts with the same prompts in one batch. The rate of
    infer is that of its decode steps; its processor seconds are those of the whole run, less those of a run that writes
    one token a prompt."""
    prompts = [json.loads(line)["prompt"] for line in open(path, encoding="utf-8")]
    tokens, shares, used = int(tokens), [], []

    def run(most):
        child = subprocess.Popen([*infer, "--prompts", path, "--max-new-tokens", str(most), "--temperature", "0"],
                                 stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        text = child.stderr.read()
        _, status, usage = os.wait4(child.pid, 0)
        assert status == 0, text
        found = re.search(r"wrote (\d+), ([0-9.]+) tokens/s", text)
        return int(found[1]), float(found[2]), usage.ru_utime + usage.ru_stime

    for _ in range(int(rounds)):
        served, of_server = rate(prompts, tokens, pid)
        first, whole = run(1), run(tokens)
        of_infer = 1000 * (whole[2] - first[2]) / (whole[0] - first[0])
        shares.append(served / whole[1])
        used.append(of_server / of_infer)
        print("%d clients: %.0f tokens/s, infer --prompts %.0f: %.1f%%; processor seconds per 1000 tokens %.3f and %.3f" %
              (len(prompts), served, whole[1], 100 * shares[-1], of_server, of_infer), flush=True)
    print("median of %d rounds: %.1f%% of the tokens/s, %.2f times the processor seconds" %
          (len(shares), 100 * sorted(shares)[len(shares) // 2], sorted(used)[len(used) // 2]))


def throughput(model, path, tokens, rounds):
    """Any server of this interface: tokens per second of one client for each prompt, all at once, and the median time of
    a whole answer of one client alone. A server that reports no usage is taken at its word: all tokens."""
    prompts = [json.loads(line)["prompt"] for line in open(path, encoding="utf-8")]
    tokens, found, counts = int(tokens), [], [0] * len(prompts)

    def ask(number, wanted):
        body = {"model": model, "prompt": prompts[number], "max_tokens": wanted, "temperature": 0}
        status, text = call("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        assert status == 200, text
        counts[number] = (json.loads(text).get("usage") or {}).get("completion_tokens", wanted)

    ask(0, 2)
    for _ in range(int(rounds)):
        start = time.time()
        in_threads(len(prompts), lambda number: ask(number, tokens))
        found.append(sum(counts) / (time.time() - start))
        start = time.time()
        ask(0, tokens)
        print("%d clients: %.0f tokens/s; one alone: %.0f tokens/s" %
              (len(prompts), found[-1], counts[0] / (time.time() - start)), flush=True)
    print("median of %d rounds: %.0f tokens/s" % (len(found), sorted(found)[len(found) // 2]))


def pauses(streams, length, rounds):
    """How long streams wait for their next event while a prompt of `length` tokens is read, in steps: the median time
    between two events of a stream before. One thread reads all sockets, and sends the prompt: a second one would hold
    Python's lock while it makes the request."""
    streams, length, chance = int(streams), int(length), random.Random(5)
    selector, last, gaps = selectors.DefaultSelector(), {}, []
    connections = [socket.create_connection(("127.0.0.1", PORT), WAIT) for _ in range(streams)]
    for connection in connections:
        connection.sendall(request_bytes({"prompt": [chance.randrange(9, 99) for _ in range(5)], "max_tokens": 2000,
                                          "temperature": 0, "stream": True}))
        selector.register(connection, selectors.EVENT_READ)

    def watch(ends, asking=None):
        """Collects gaps until `ends` is true, or the socket `asking` has its answer."""
        gaps.clear()
        if asking:
            selector.register(asking, selectors.EVENT_READ)
        answered = False
        while not answered and not (ends and ends()):
            for key, _ in selector.select(0.01):
                now, part = time.perf_counter(), key.fileobj.recv(1 << 16)
                if key.fileobj is asking:
                    answered = True
                    assert part.startswith(b"HTTP/1.1 200"), part
                    selector.unregister(asking)
                elif not part:
                    selector.unregister(key.fileobj)
                else:
                    if key.fileobj in last:
                        gaps.append(now - last[key.fileobj])
                    last[key.fileobj] = now
        return sorted(gaps)

    watch(lambda: len(last) == streams and len(gaps) > 20 * streams)
    worst = []
    for _ in range(int(rounds)):
        alone = watch(lambda: len(gaps) > 60 * streams)
        step = alone[len(alone) // 2]
        request = request_bytes({"prompt": [chance.randrange(9, 99) for _ in range(length)], "max_tokens": 1})
        with socket.create_connection(("127.0.0.1", PORT), WAIT) as asking:
            start = time.perf_counter()
            asking.sendall(request)
            beside = watch(None, asking)
        worst.append(beside[-1] / step)
        print("%d streams, a step of %.2f ms: longest wait %.1f steps, beside a prompt of %d tokens %.1f (99 of 100 waits: "
              "up to %.1f); first token after %.0f ms" % (streams, 1000 * step, alone[-1] / step, length, worst[-1],
              beside[len(beside) * 99 // 100] / step, 1000 * (time.perf_counter() - start)), flush=True)
    print("median of %d prompts: the longest wait is %.1f steps" % (len(worst), sorted(worst)[len(worst) // 2]))
    for connection in connections:
        connection.close()


COLUMNS = ("load", "offered/s", "answered/s", "refused", "batch", "queue", "pages", "wait_ms", "first_ms", "request_ms")


def load(path, seconds):
    """Offers requests at random times at eight rates, shares of the rate that 16 clients in a loop reach, and writes a
    row of means for each from /metrics: sequences in the batch, requests in the queue, the share of pages in use, and
    the latencies that the server saw."""
    seconds, chance = float(seconds), random.Random(11)

    def ask(number=None):
        del number
        body = {"prompt": [chance.randrange(9, 900) for _ in range(chance.randrange(20, 200))],
                "max_tokens": chance.randrange(10, 60), "temperature": 1}
        return call("POST", "/v1/completions", body)[0]

    def read():
        found = {}
        for line in call("GET", "/metrics")[1].split("\n"):
            if line and not line.startswith("#"):
                found[line.rsplit(" ", 1)[0]] = float(line.rsplit(" ", 1)[1])
        return found

    def looped(_):
        end = time.time() + seconds
        while time.time() < end:
            assert ask() == 200

    in_threads(16, lambda _: ask())
    before = read()
    in_threads(16, looped)
    answers = 'megatron_requests_total{endpoint="/v1/completions",status="%d"}'
    capacity = (read()[answers % 200] - before[answers % 200]) / seconds
    rows = []
    for share in (0.2, 0.4, 0.6, 0.8, 0.9, 1.0, 1.2, 1.5):
        await_idle()
        before, states, threads, asked = read(), [], [], 0
        start = time.time()
        due, look = start, start
        while time.time() - start < seconds:
            if time.time() >= due:
                threads.append(threading.Thread(target=ask))
                threads[-1].start()
                due, asked = due + chance.expovariate(share * capacity), asked + 1
            elif time.time() >= look:
                states.append(read())
                look = time.time() + 0.05
            else:
                time.sleep(max(0, min(due, look) - time.time()))
        took = time.time() - start
        for thread in threads:
            thread.join()
        after = read()

        def grown(name, before=before, after=after):
            return after.get(name, 0) - before.get(name, 0)

        def mean(name, states=states):
            return sum(state[name] for state in states) / len(states)

        def latency(name, grown=grown):
            return 1000 * grown(name + "_sum") / grown(name + "_count")

        rows.append((share, asked / took, grown(answers % 200) / took, grown(answers % 429) / asked,
                     mean("megatron_sequences_running"), mean("megatron_requests_waiting"),
                     mean("megatron_cache_pages_used") / after["megatron_cache_pages"],
                     latency("megatron_queue_seconds"), latency("megatron_first_token_seconds"),
                     latency("megatron_request_seconds")))
        print(" ".join("%.3g" % value for value in rows[-1]), flush=True)
    with open(path, "w", encoding="ascii") as out:
        out.write("# Written by tests/record_serve.sh; notes/draw.c draws it.\n# " + " ".join(COLUMNS) + "\n")
        for row in rows:
            out.write(" ".join("%.3g" % value for value in row) + "\n")


if __name__ == "__main__":
    PORT = int(sys.argv[1])
    globals()[sys.argv[2]](*sys.argv[3:])
