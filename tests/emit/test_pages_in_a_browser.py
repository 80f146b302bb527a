"""Pages in a real browser without a window: no error on its console, no text out of its box, nothing wider than a
telephone. Skipped, with the line that says so, where there is none."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest
from test_pages import KINDS, estimate, hostile_plan, page_of, plan_of

from autoplan.emit.pages.markup import WhatIf
from autoplan.emit.pages.page import plan_page
from autoplan.values import replace

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no browser: apt-get install chromium")

QUICK = ("deepseek_v3",)  # the others too, where there is time
MODELS = [pytest.param(name, id=kind, marks=() if name in QUICK else pytest.mark.slow) for name, kind in KINDS.items()]

# Measured by the browser itself: texts that leave their box, texts of one drawing that lie on each other, the width of
# the page, and how long it took; what a search and a click do.
PROBE = """<script>addEventListener('load',function(){
var out=[],root=document.documentElement;
document.querySelectorAll('.box').forEach(function(b){var r=b.querySelector('rect').getBoundingClientRect();
b.querySelectorAll('text').forEach(function(t){var q=t.getBoundingClientRect();
if(q.left<r.left-1||q.right>r.right+1||q.top<r.top-2||q.bottom>r.bottom+2)out.push(t.textContent)})});
var wide=root.scrollWidth-root.clientWidth;
var link=document.querySelector('svg a');var opened=false;
if(link){location.hash=link.getAttribute('href');
opened=null;setTimeout(function(){
opened=document.querySelector(link.getAttribute('href')).open;tell()},200)}else tell();
function tell(){var f=document.getElementById('search');f.value='zzz';f.dispatchEvent(new Event('input'));
var said={out:out,wide:wide,opened:opened,hits:document.getElementById('hits').textContent,
took:performance.timing.domContentLoadedEventEnd-performance.timing.responseEnd};
document.body.setAttribute('data-probe',JSON.stringify(said));
if(parent!==window)parent.postMessage(JSON.stringify(said),'*')}});</script>"""
# What each radio button shows: the cases that can be seen, and by how much the page is wider than the window.
SWITCH = """<script>addEventListener('load',function(){var said={};
document.querySelectorAll('input[name=case]').forEach(function(one){one.click();var seen={};
document.querySelectorAll('.case').forEach(function(c){
if(getComputedStyle(c).display!=='none')seen[c.className.split(' ').indexOf(one.id.replace('at','case'))>0]=1});
var root=document.documentElement;
said[one.id]={seen:Object.keys(seen),wide:root.scrollWidth-root.clientWidth}});
document.body.setAttribute('data-probe',JSON.stringify(said));
if(parent!==window)parent.postMessage(JSON.stringify(said),'*')});</script>"""
FRAME = """<!DOCTYPE html><html><head><meta charset="utf-8"></head><body>
<iframe src="page.html" width="390" height="800" style="border:0"></iframe>
<script>addEventListener('message',function(e){
document.body.setAttribute('data-probe',e.data)});</script></body></html>"""


def probed(folder: Path, page: str, phone: bool, probe: str = PROBE) -> dict:
    """What the browser measured; it must have had nothing to complain about."""
    (folder / "page.html").write_text(page.replace("</body>", f"{probe}</body>"), encoding="utf-8")
    (folder / "frame.html").write_text(FRAME, encoding="utf-8")
    shown = folder / ("frame.html" if phone else "page.html")
    how = ["--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--window-size=1440,900",
           "--virtual-time-budget=3000", f"--user-data-dir={folder / 'profile'}", "--dump-dom"]  # fmt: skip
    run = subprocess.run([str(BROWSER), *how, shown.as_uri()], capture_output=True, text=True, timeout=120, check=False)
    assert "CONSOLE" not in run.stderr, run.stderr
    said = re.search(r'<body[^>]* data-probe="([^"]*)"', run.stdout)
    assert said, run.stderr[-2000:]
    return json.loads(unescape(said[1]))


@pytest.mark.parametrize("phone", [False, True], ids=["1440", "390"])
@pytest.mark.parametrize("name", MODELS)
def test_a_page_opens_and_nothing_leaves_its_place(name: str, phone: bool, tmp_path: Path) -> None:
    said = probed(tmp_path, page_of(name), phone)
    assert said["out"] == []
    assert said["wide"] <= 0
    assert said["opened"] is True  # a click on a box opens its explanation
    assert said["hits"] == "0 in the drawing, 0 explained below"
    assert said["took"] < 1000


@pytest.mark.parametrize("phone", [False, True], ids=["1440", "390"])
def test_each_button_shows_its_own_case_alone(phone: bool, tmp_path: Path) -> None:
    plan = plan_of("llama")
    known = {16: WhatIf(replace(plan, flow=()), estimate("elsewhere")), 2: WhatIf(plan, estimate("here"))}
    said = probed(tmp_path, plan_page(plan, plan.to_dict(), estimate("here"), 0, known), phone, SWITCH)
    assert {"at-2", "at-16"} < said.keys()
    assert all(one == {"seen": ["true"], "wide": 0} for one in said.values()), said


def test_hostile_names_run_nothing(tmp_path: Path) -> None:
    plan = hostile_plan()
    page = plan_page(plan, plan.to_dict())
    assert probed(tmp_path, page, False)["wide"] <= 0
