"""A ballastd with two identities, `trainer` and `few` (the rights to train jobs x-*), and a trainer of its job `trained`."""
import hashlib, json, os, subprocess, time, urllib.error, urllib.request

MODEL = ["--layers", "2", "--width", "128", "--heads", "2", "--context", "32", "--batch", "1", "--micro-batches", "2",
         "--chunk-elements", "65536"]
# Its steps take some 0.4 s of one core: of the toy's steps, which take milliseconds, a scheduler's turn is a multiple.
JUDGED_MODEL = ["--layers", "4", "--width", "192", "--heads", "4", "--context", "64", "--batch", "3", "--micro-batches", "16",
                "--chunk-elements", "65536"]


class Server:
    def __init__(self, binaries, directory, flags=(), prefix=(), stderr=None, environment=None):
        """`prefix`: words in front of the commands. `stderr`: an open file, else one in `directory`."""
        self.bin, self.dir, self.prefix = binaries, directory, list(prefix)
        rights, tokens = "rights:\n", "tokens:\n"
        for name, grant in (("trainer", "jobs: '*', can: [train, status, drop]"), ("few", "jobs: 'x-*', can: [train]")):
            secret = (name + "-secret-of-some-length").encode()
            open(f"{directory}/{name}", "wb").write(secret)
            tokens += f"- {{identity: {name}, sha256: {hashlib.sha256(secret).hexdigest()}}}\n"
            rights += f"- {{identity: {name}, {grant}}}\n"
        open(f"{directory}/tokens.yaml", "w").write(tokens)
        open(f"{directory}/rights.yaml", "w").write(rights)
        self.process = subprocess.Popen(
            [*self.prefix, f"{binaries}/ballastd", "--listen", "127.0.0.1:0", "--metrics_listen", "127.0.0.1:0", "--data_directory",
             f"{directory}/data", "--budget.dram", "256MiB", "--budget.nvme", "512MiB", "--compute_threads", "2",
             "--tokens", f"{directory}/tokens.yaml", "--rights", f"{directory}/rights.yaml", *flags],
            stdout=subprocess.PIPE, stderr=stderr or open(f"{directory}/err", "w"), text=True,
            env={**os.environ, **(environment or {})})
        line = self.process.stdout.readline()
        assert line.startswith("ballastd ready"), line
        words = dict(word.split("=", 1) for word in line.split()[2:])
        self.address, self.http = words["listen"], words["metrics"]

    def status(self, name):
        for line in open(f"/proc/{self.process.pid}/status"):
            if line.startswith(name + ":"):
                return int(line.split()[1])

    def memory(self):
        return self.status("VmRSS") << 10

    def threads(self):
        return self.status("Threads")

    def processor_seconds(self):
        stat = open(f"/proc/{self.process.pid}/stat").read().rsplit(")", 1)[1].split()
        return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")

    def step_times(self, since):
        """Of the last steps that ended after `since`: the seconds from each decision to the next, and of these the trainer's own.

        Shortest first."""
        steps = json.loads(self.get("/steps.json?last=256")[1])["jobs"][0]["steps"]
        decided = [(float(step["decided_seconds"]), step) for step in steps if "decided_seconds" in step]
        return sorted((after - before, max([float(time["max_seconds"]) for time in step.get("trainers", []) if time["what"] == "compute"],
                                           default=0)) for (before, _), (after, step) in zip(decided, decided[1:]) if after > since)

    def step(self):
        """The newest step of the trainer's job; -1 before the first."""
        steps = [step for job in json.loads(self.get("/steps.json?last=1")[1]).get("jobs", []) for step in job.get("steps", [])]
        return int(steps[-1]["step"]) if steps else -1

    def await_step(self, step, seconds):
        """The newest step; at least `step`, unless it takes longer."""
        until = time.time() + seconds
        while (newest := self.step()) < step and time.time() < until:
            time.sleep(0.05)
        return newest

    def get(self, path):
        try:
            with urllib.request.urlopen(f"http://{self.http}{path}", timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def train(self, steps, model=MODEL):
        return subprocess.Popen(
            [*self.prefix, f"{self.bin}/train_bytes_lm", "--servers", self.address, "--steps", "100000", "--stop-at", str(steps),
             *model, "--job", "trained", "--token-file", f"{self.dir}/trainer", "--timeout", "60"],
            stdout=subprocess.DEVNULL, stderr=open(f"{self.dir}/trainer.err", "w"))

    def client_connects(self):
        return subprocess.run([f"{self.bin}/ballastctl", "status", "--servers", self.address, "--token-file",
                               f"{self.dir}/trainer", "--timeout", "60"], capture_output=True, text=True)
