"""Calls of gRPC by hand, as no client of the library makes them: halves of calls, and messages that are no message."""
import re, socket, struct


def field(name, value):
    """A header, without HPACK's tables and Huffman codes."""
    return b"\x00" + bytes([len(name)]) + name + b"\x7f" + varint(len(value) - 127) + value \
        if len(value) >= 127 else b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value


def varint(n):
    out = b""
    while n >= 128:
        out += bytes([n & 127 | 128])
        n >>= 7
    return out + bytes([n])


def headers(path, token):
    """`SAID` is what a trainer says in each call; without it no call goes past its headers."""
    block = field(b":method", b"POST") + field(b":scheme", b"http") + field(b":path", path) + \
        field(b":authority", b"localhost") + field(b"content-type", b"application/grpc") + field(b"te", b"trailers")
    for name, value in SAID.items():
        block += field(name, value)
    return block + (field(b"authorization", b"Bearer " + token) if token else b"")


class Http2:
    """A connection of HTTP/2 that sends what it is told to, and reads only to be allowed to send more."""

    def __init__(self, address, source=""):
        host, port = address.rsplit(":", 1)
        self.socket = socket.create_connection((host, int(port)), timeout=120, source_address=(source, 0))
        self.window, self.streams, self.initial, self.next = 65535, {}, 65535, 1
        self.ended = {}  # by stream: the last headers
        self.answer, self.unread = b"", b""
        # gRPC's setting 0xfe03: details of errors come as they are.
        self.socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + self.frame(4, 0, 0, struct.pack(">HI", 0xfe03, 1)))

    @staticmethod
    def frame(kind, flags, stream, payload):
        return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload

    def open(self, path, token):
        stream, self.next = self.next, self.next + 2
        self.streams[stream] = self.initial
        self.socket.sendall(self.frame(1, 4, stream, headers(path, token)))
        return stream

    def send(self, stream, data, end):
        """True once all is sent; False if the server ended the stream before."""
        at = 0
        while at < len(data):
            if stream in self.ended:
                return False
            room = min(self.window, self.streams[stream], 16384, len(data) - at)
            if room <= 0:
                self.read()
                continue
            self.socket.sendall(self.frame(0, 1 if end and at + room == len(data) else 0, stream, data[at:at + room]))
            self.window -= room
            self.streams[stream] -= room
            at += room
        return True

    def read(self):
        data = self.socket.recv(1 << 16)
        if not data:
            raise ConnectionError("the server closed the connection")
        self.unread += data
        while len(self.unread) >= 9:
            length = int.from_bytes(self.unread[:3], "big")
            if len(self.unread) < 9 + length:
                return
            kind, flags = self.unread[3], self.unread[4]
            stream = int.from_bytes(self.unread[5:9], "big") & 0x7fffffff
            self.take(kind, flags, stream, self.unread[9:9 + length])
            self.unread = self.unread[9 + length:]

    def take(self, kind, flags, stream, payload):
        if kind == 8:
            grant = int.from_bytes(payload, "big")
            if stream == 0:
                self.window += grant
            elif stream in self.streams:
                self.streams[stream] += grant
        elif kind == 4 and not flags & 1:
            for at in range(0, len(payload), 6):
                name, value = struct.unpack(">HI", payload[at:at + 6])
                if name == 4:
                    for one in self.streams:
                        self.streams[one] += value - self.initial
                    self.initial = value
            self.socket.sendall(self.frame(4, 1, 0, b""))
        elif kind == 6 and not flags & 1:
            self.socket.sendall(self.frame(6, 1, 0, payload))
        elif kind == 0:
            self.answer += payload
        elif kind == 1 and flags & 1:
            self.ended[stream] = payload
        elif kind == 3:
            self.ended.setdefault(stream, b"")

    def look(self):
        """Reads what has come."""
        self.socket.settimeout(0.01)
        try:
            while True:
                self.read()
        except (ConnectionError, socket.timeout):
            pass


def refusal(trailers):
    """Reason and message of an error, as gRPC sends both without compression."""
    reason = re.search(rb"\n.([A-Z_]{3,30})\x12", trailers)
    message = re.search(rb"[\x20-\x7e]{20,}", trailers)
    return (reason.group(1).decode() if reason else "none", message.group(0).decode() if message else repr(trailers))


def call(address, path, token, message, patience=120):
    """What the server says to one call."""
    link = Http2(address)
    link.socket.settimeout(patience)
    try:
        stream = link.open(path, token)
        link.send(stream, struct.pack(">BI", 0, len(message)) + message, True)
        while stream not in link.ended:
            link.read()
        return refusal(link.ended[stream])
    except (ConnectionError, socket.timeout, BrokenPipeError) as error:
        return ("none", str(error))
    finally:
        link.socket.close()


def delimited(number, payload):
    return varint(number << 3 | 2) + varint(len(payload)) + payload


OPEN = b"/ballast.v1.StateService/Open"
SAID = {}


def learn(address, token):
    """The protocol's version, and the server's name, as its Identify tells them to each trainer."""
    link = Http2(address)
    stream = link.open(b"/ballast.v1.StateService/Identify", token)
    link.send(stream, struct.pack(">BI", 0, 0), True)
    while stream not in link.ended:
        link.read()
    link.socket.close()
    SAID[b"ballast-protocol"] = str(fields(link.answer[5:])[2]).encode()
    SAID[b"ballast-server"] = fields(link.answer[5:])[1] + b"/%016x" % fields(link.answer[5:])[6]


def fields(message):
    """The last value of each field of a message of Protocol Buffers."""
    found, at = {}, 0

    def number():
        nonlocal at
        value = shift = 0
        while True:
            value |= (message[at] & 127) << shift
            shift, at = shift + 7, at + 1
            if message[at - 1] < 128:
                return value
    while at < len(message):
        tag = number()
        if tag & 7 == 0:
            found[tag >> 3] = number()
        else:
            length = number() if tag & 7 == 2 else 8
            found[tag >> 3] = message[at:at + length] if tag & 7 == 2 else int.from_bytes(message[at:at + 8], "little")
            at += length
    return found
