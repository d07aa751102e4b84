"""Opens the page of a server in headless Chromium, and talks to it: serve_page.py PORT PROFILE.

PROFILE is an empty folder for the browser. Prints "ok NAME" or "not ok NAME: REASON" for each property.
"""
import sys
import time

import book_check
from book_check import Browser, check

PORT, PROFILE = int(sys.argv[1]), sys.argv[2]
WAIT = 300  # seconds after which the page hangs, on any machine
ADDRESS = "http://127.0.0.1:%d/" % PORT


def wait_for(browser, expression):
    end = time.time() + WAIT
    while not browser.value(expression):
        if time.time() > end:
            return False
        time.sleep(0.05)
    return True


def press(browser, key, text=""):
    code = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowLeft": 37}.get(key, 0)
    for kind in "keyDown", "keyUp":
        browser.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code,
                     **({"text": text} if text and kind == "keyDown" else {}))


def send(browser, text, tokens, mode):
    """Types a text, and sends it by the keyboard alone."""
    browser.value("""at("clear").click(), at("tokens").value = %d, at("mode").value = "%s", at("temperature").value = 0,
                  at("input").value = "", at("input").focus()""" % (tokens, mode))
    browser.call("Input.insertText", text=text)
    press(browser, "Enter", "\r")


def conversation_problems(browser):
    send(browser, "Hello", 12, "chat")
    if not wait_for(browser, "!running && document.querySelectorAll('.token').length > 3"):
        yield "no answer: " + browser.value("document.body.innerText")
    said = browser.value("[...document.querySelectorAll('.turn')].map(t => t.dataset.role + ': ' + t.textContent)")
    if said[0] != "user: Hello" or not said[1].startswith("assistant: ") or len(said) != 2:
        yield "turns: %s" % said
    wanted = browser.value("""fetch("v1/chat/completions", {method: "POST", body: JSON.stringify({temperature: 0,
        max_tokens: 12, messages: [{role: "user", content: "Hello"}]})}).then(a => a.json())
        .then(a => a.choices[0].message.content)""")
    if said[1] != "assistant: " + wanted:
        yield "%r, and the server says %r" % (said[1], wanted)
    if "tokens/s" not in browser.value("at('rates').textContent"):
        yield "rates: " + browser.value("at('rates').textContent")


def token_problems(browser):
    """A continuation's tokens have colours, and five rivals under the pointer or by the keyboard."""
    send(browser, "abc", 20, "text")
    wait_for(browser, "!running && document.querySelectorAll('.token').length > 5")
    colours = browser.value("new Set([...document.querySelectorAll('.token')].map(t => t.style.background)).size")
    if colours < 2:
        yield "%d colours" % colours
    place = browser.value("""(() => { const box = document.querySelectorAll(".token")[2].getBoundingClientRect();
        return [box.left + box.width / 2, box.top + box.height / 2]; })()""")
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=place[0], y=place[1])
    text = browser.value("at('rivals').hidden ? '' : at('rivals').textContent")
    if text.count("%") != 6:
        yield "under the pointer: %r" % text
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)
    browser.value("at('log').focus()")
    press(browser, "ArrowLeft")
    if browser.value("document.activeElement.className") != "token" or browser.value("at('rivals').hidden"):
        yield "no token by the keyboard: " + browser.value("document.activeElement.outerHTML.slice(0, 200)")


def stop_problems(browser):
    """Escape stops a long answer; the page can be used at once."""
    send(browser, "a", 4000, "text")
    wait_for(browser, "document.querySelectorAll('.token').length > 2")
    press(browser, "Escape")
    if not wait_for(browser, "!running && !at('send').disabled"):
        yield "it does not stop"
    if "(stopped)" not in browser.value("at('rates').textContent"):
        yield "rates: " + browser.value("at('rates').textContent")


def error_problems(browser):
    """An error of the server is shown in its words."""
    send(browser, "a", 100000, "text")
    wait_for(browser, "!running")
    text = browser.value("(document.querySelector('[data-role=error]') || {}).textContent")
    if not text or "the context of this server" not in text:
        yield "shown: %s" % text


def width_problems(browser):
    for width in 320, 390, 1200:
        browser.size(width)
        widest = browser.value("Math.max(document.documentElement.scrollWidth, document.body.scrollWidth)")
        if widest > width:
            yield "%d wide at a width of %d" % (widest, width)
    browser.size(390)


def request_problems(browser):
    """It asks its own server alone, and complains of nothing but the refusal above."""
    for event in browser.events:
        about = event.get("params", {})
        if event.get("method") == "Network.requestWillBeSent" and not about["request"]["url"].startswith(ADDRESS):
            yield "asks for " + about["request"]["url"]
        if event.get("method") == "Runtime.exceptionThrown":
            yield about["exceptionDetails"].get("exception", {}).get("description", "an exception")


def main():
    browser = Browser(PROFILE)
    browser.open_tab()
    browser.go(ADDRESS)
    check("a_page_holds_a_conversation", list(conversation_problems(browser)))
    check("tokens_have_colours_and_rivals", list(token_problems(browser)))
    check("escape_stops_an_answer", list(stop_problems(browser)))
    check("errors_are_shown_in_the_servers_words", list(error_problems(browser)))
    check("the_page_fits_a_narrow_screen", list(width_problems(browser)))
    check("the_page_asks_its_own_server_alone", list(request_problems(browser)))
    browser.process.terminate()
    browser.process.wait()
    sys.exit(book_check.failed)


if __name__ == "__main__":
    main()
