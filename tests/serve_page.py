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


def model_problems(browser):
    """The models of the server can be chosen, and answer."""
    names = browser.value("[...at('model').options].map(option => option.value)")
    if len(names) != 2 or browser.value("at('models').hidden"):
        return (yield "models: %s" % names)
    said = []
    for name in names:
        browser.value("at('model').value = '%s'" % name)
        send(browser, "abc", 20, "text")
        wait_for(browser, "!running && document.querySelectorAll('.token').length > 0")
        said.append(browser.value("at('input').value"))
    if said[0] == said[1]:
        yield "both models say %r" % said[0]
    browser.value("at('model').value = '%s'" % names[0])


def keyboard_problems(browser):
    """Tab reaches everything that a mouse can, and each has a name; a conversation by keys alone, with a letter as a
    key, a stop by Tab and Enter, and a new one."""
    browser.value("at('clear').click(), at('tokens').value = 8000, document.activeElement.blur()")
    wanted = browser.value("""[...document.querySelectorAll("select, input, textarea, button, #log")]
        .filter(e => !e.disabled && e.offsetParent).map(e => e.id)""")
    nameless = browser.value("""[...document.querySelectorAll("select, input, textarea, button, #log")].filter(e =>
        !(e.labels && e.labels.length) && !e.getAttribute("aria-label") && !e.textContent.trim()).map(e => e.id)""")
    reached = []
    for _ in range(3 * len(wanted)):
        press(browser, "Tab")
        reached.append(browser.value("document.activeElement.id"))
    if not set(wanted) <= set(reached):
        yield "Tab does not reach %s" % sorted(set(wanted) - set(reached))
    if nameless:
        yield "no name: %s" % nameless

    def tab_to(name):
        for _ in range(3 * len(wanted)):
            if browser.value("document.activeElement.id") == name:
                return True
            press(browser, "Tab")
        return False

    tab_to("input")
    for letter in "Hi":
        press(browser, letter, letter)
    press(browser, "Enter", "\r")
    if not wait_for(browser, "running && document.querySelectorAll('.token').length > 2"):
        yield "no stream: " + browser.value("document.body.innerText")
    if not tab_to("stop"):
        yield "Tab does not reach Stop"
    press(browser, "Enter", "\r")
    if not wait_for(browser, "!running") or "(stopped)" not in browser.value("at('rates').textContent"):
        yield "it does not stop: " + browser.value("at('rates').textContent")
    tab_to("clear")
    press(browser, "Enter", "\r")
    if browser.value("document.querySelectorAll('.turn').length") != 0:
        yield "New leaves " + browser.value("at('log').textContent")


def width_problems(browser):
    for width in 320, 390, 1200:
        browser.size(width)
        widest = browser.value("Math.max(document.documentElement.scrollWidth, document.body.scrollWidth)")
        if widest > width:
            yield "%d wide at a width of %d" % (widest, width)
    browser.size(390)


def picture_problems(browser):
    """A model without a vision tower is shown no pictures."""
    if browser.value("at('pictures').offsetParent !== null"):
        yield "the page takes pictures"


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
    check("models_can_be_chosen", list(model_problems(browser)))
    check("everything_works_by_the_keyboard_alone", list(keyboard_problems(browser)))
    check("the_page_fits_a_narrow_screen", list(width_problems(browser)))
    check("a_model_of_texts_takes_no_pictures", list(picture_problems(browser)))
    check("the_page_asks_its_own_server_alone", list(request_problems(browser)))
    browser.process.terminate()
    browser.process.wait()
    sys.exit(book_check.failed)


if __name__ == "__main__":
    main()
