# Runs a command in a terminal of 80 by 24 cells, and prints what became of both as JSON.
#
#   terminal.py STEPS COMMAND...
#
# STEPS is a JSON list of [what, text]: "wait" until the text is on the screen, "type" it, or send
# the "signal" of this number. Then the command must end.
import fcntl, json, os, pty, re, select, signal, struct, sys, termios, time

DEADLINE = time.monotonic() + 120
STEPS, COMMAND = json.loads(sys.argv[1]), sys.argv[2:]

# This side keeps the terminal open, so that its settings can be read when the command has ended.
master, slave = pty.openpty()
fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
before = termios.tcgetattr(slave)
child = os.fork()
if child == 0:
    os.setsid()
    fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
    for fd in range(3):
        os.dup2(slave, fd)
    os.environ["TERM"] = "xterm"
    os.execv(COMMAND[0], COMMAND)

output = b""


def read(patience):
    global output
    if select.select([master], [], [], patience)[0]:
        output += os.read(master, 65536)
        return True
    return False


def screen():
    """Returns the lines of the screen: text is written where the cursor was moved to."""
    lines, row, column = [[" "] * 80 for _ in range(24)], 0, 0
    text = output.decode(errors="replace")
    for move, other, written in re.findall(r"\x1b\[(\d+;\d+)H|(\x1b\[[?\d;]*[a-zA-Z])|([^\x1b]+)", text):
        if move:
            row, column = (int(number) - 1 for number in move.split(";"))
        for char in written:
            lines[row][min(column, 79)] = char
            column += 1
    return "\n".join("".join(line) for line in lines)


def give_up(why):
    os.kill(child, signal.SIGKILL)
    sys.exit(f"{why}:\n{screen()}")


for what, text in STEPS:
    if what == "type":
        os.write(master, text.encode())
    elif what == "signal":
        os.kill(child, int(text))
    while what == "wait" and text not in screen():
        if time.monotonic() > DEADLINE:
            give_up(f"no {text!r}")
        read(1)
while True:
    done, status = os.waitpid(child, os.WNOHANG)
    if done:
        break
    if time.monotonic() > DEADLINE:
        give_up("it does not end")
    read(0.01)
while read(0):
    pass
print(json.dumps({
    "status": os.waitstatus_to_exitcode(status),
    "is_restored": termios.tcgetattr(slave) == before,
    "output": output.decode(errors="replace"),
}))
