package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"
)

// prompt is one request ready to be sent: before | fresh words | after. The middle is the run of '~' in the file's line.
type prompt struct {
	before, seen, after []byte
}

type client struct {
	epoll   int
	conns   map[int32]*clientConn
	prompts []prompt
	next    int
	fresh   bool
	random  uint64
	chunks  int // events that an answer must have

	warmEndNs, endNs int64
	left             int // requests to start; -1: until endNs
	open             int // requests on their way
	ttftNs, totalNs  []int32
	errors           int
	firstError       string
	counted          int
	firstNs, lastNs  int64
}

type clientConn struct {
	fd      int
	address string
	parts   [3][]byte // of the request, what is left to send
	iov     [3]syscall.Iovec
	middle  []byte // this connection's fresh words
	in      []byte
	have    int
	head    head
	hasHead bool
	startNs int64
	firstNs int64
	busy    bool
}

func runLoad(args []string) {
	flags := flag.NewFlagSet("load", flag.ExitOnError)
	to := flags.String("to", "", "HOST:PORT of the router; several, by commas, share the connections")
	file := flags.String("prompts", "", "request bodies, one JSON object a line; a run of ~ stands for the last message's words")
	n := flags.Int("conns", 1, "connections, each with one request at a time")
	seconds := flags.Float64("seconds", 2, "of measuring")
	warm := flags.Float64("warm-seconds", 0.3, "before measuring, not counted")
	count := flags.Int("count", 0, "send so many requests, count all, then end (instead of -seconds)")
	from := flags.Int("from", 0, "line of the first prompt")
	fresh := flags.Uint64("fresh", 0, "seed of new words for every request's last message; 0: the same words each time")
	chunks := flags.Int("chunks", answerChunks, "events that every answer must have")
	_ = flags.Parse(args)
	epoll, err := syscall.EpollCreate1(syscall.EPOLL_CLOEXEC)
	must("epoll", err)
	c := &client{epoll: epoll, conns: map[int32]*clientConn{}, next: *from, chunks: *chunks}
	c.fresh, c.random = *fresh != 0, *fresh*0x9E3779B97F4A7C15+1
	addresses := strings.Split(*to, ",")
	c.readPrompts(*file)
	begin := nowNs()
	if *count > 0 {
		c.left, c.warmEndNs, c.endNs = *count, 0, begin+int64(120e9)
	} else {
		c.left, c.warmEndNs = -1, begin+int64(*warm*1e9)
		c.endNs = c.warmEndNs + int64(*seconds*1e9)
	}
	c.ttftNs, c.totalNs = make([]int32, 0, 1<<21), make([]int32, 0, 1<<21)
	for i := 0; i < *n; i++ {
		conn := &clientConn{address: addresses[i%len(addresses)], in: make([]byte, 64<<10), middle: make([]byte, 4096)}
		c.dial(conn)
		c.start(conn)
	}
	c.run()
	c.tell()
}

func (c *client) readPrompts(file string) {
	f, err := os.Open(file)
	must("prompts", err)
	defer f.Close()
	lines := bufio.NewScanner(f)
	lines.Buffer(make([]byte, 1<<20), 16<<20)
	words := uint64(12345)
	for lines.Scan() {
		body := bytes.Clone(lines.Bytes())
		head := "POST /v1/chat/completions HTTP/1.1\r\nHost: router\r\nUser-Agent: bench\r\nAccept: application/json\r\n" +
			"Authorization: Bearer bench\r\nContent-Type: application/json\r\n" + fmt.Sprintf("Content-Length: %d\r\n\r\n", len(body))
		start := bytes.Index(body, []byte("~~~~~~~~"))
		stop := start
		for start >= 0 && body[stop] == '~' {
			stop++
		}
		p := prompt{before: []byte(head + string(body[:max(start, 0)])), after: body[max(stop, 0):]}
		if start >= 0 {
			p.seen = make([]byte, stop-start)
			fill(p.seen, &words)
		}
		c.prompts = append(c.prompts, p)
	}
	must("prompts", lines.Err())
	if len(c.prompts) == 0 {
		fail("no prompts in " + file)
	}
}

var vocabulary = strings.Fields(`the path code function class test error return value list dict string number read open search replace
	edit run build install check fix bug change commit branch merge review user tool call result input request response server client
	cache block prefix token model worker router queue latency memory disk network`)

// fill writes words, each preceded by a space.
func fill(into []byte, random *uint64) {
	for at := 0; at < len(into); {
		into[at] = ' '
		*random ^= *random << 13
		*random ^= *random >> 7
		*random ^= *random << 17
		at += 1 + copy(into[at+1:], vocabulary[*random%uint64(len(vocabulary))])
	}
}

func (c *client) dial(conn *clientConn) {
	fd, err := connect(conn.address)
	must("connect to "+conn.address, err)
	conn.fd = fd
	c.conns[int32(fd)] = conn
	must("epoll", watch(c.epoll, fd))
}

func (c *client) start(conn *clientConn) {
	now := nowNs()
	if c.left == 0 || now >= c.endNs {
		return
	}
	if c.left > 0 {
		c.left--
	}
	p := &c.prompts[c.next%len(c.prompts)]
	c.next++
	middle := p.seen
	if c.fresh && len(middle) > 0 {
		middle = conn.middle[:len(p.seen)]
		fill(middle, &c.random)
	}
	conn.parts = [3][]byte{p.before, middle, p.after}
	conn.have, conn.hasHead, conn.firstNs, conn.busy = 0, false, 0, true
	conn.startNs = nowNs()
	c.open++
	c.push(conn)
}

// push sends what is left of the request.
func (c *client) push(conn *clientConn) {
	for {
		used := 0
		for _, part := range conn.parts {
			if len(part) > 0 {
				conn.iov[used] = iovec(part)
				used++
			}
		}
		if used == 0 {
			return
		}
		n, e := writev(conn.fd, conn.iov[:used])
		if e == syscall.EAGAIN {
			return
		}
		if e != 0 {
			c.failed(conn, "write: "+e.Error())
			return
		}
		for i := range conn.parts {
			k := min(n, len(conn.parts[i]))
			conn.parts[i] = conn.parts[i][k:]
			n -= k
		}
	}
}

func (c *client) run() {
	events := make([]syscall.EpollEvent, 256)
	for c.open > 0 {
		n := wait(c.epoll, events, 1000)
		if nowNs() > c.endNs+int64(5e9) {
			c.errors += c.open
			c.note(fmt.Sprintf("%d requests without an answer 5 s after the end", c.open))
			return
		}
		for i := 0; i < n; i++ {
			conn := c.conns[events[i].Fd]
			if conn == nil {
				continue
			}
			if events[i].Events&syscall.EPOLLOUT != 0 && conn.busy {
				c.push(conn)
			}
			if events[i].Events&^syscall.EPOLLOUT != 0 {
				c.readable(conn)
			}
		}
	}
}

func (c *client) readable(conn *clientConn) {
	for {
		if conn.have == len(conn.in) {
			conn.in = append(conn.in, make([]byte, len(conn.in))...)
		}
		room := len(conn.in) - conn.have
		n, e := read(conn.fd, conn.in[conn.have:])
		if e == syscall.EAGAIN {
			return
		}
		if n <= 0 || e != 0 {
			c.failed(conn, "the connection was closed")
			return
		}
		conn.have += n
		if conn.busy {
			c.look(conn)
		} else {
			conn.have = 0
		}
		if n < room {
			if conn.busy && conn.have > 0 {
				quickAck(conn.fd)
			}
			return
		}
	}
}

// look takes notice of the first byte of the body, and of the end of the answer.
func (c *client) look(conn *clientConn) {
	if !conn.hasHead {
		conn.head, conn.hasHead = parseHead(conn.in[:conn.have])
		if !conn.hasHead {
			return
		}
	}
	body := conn.in[conn.head.length:conn.have]
	if len(body) == 0 {
		return
	}
	if conn.firstNs == 0 {
		conn.firstNs = nowNs()
	}
	if conn.head.bodyLength >= 0 {
		if len(body) < conn.head.bodyLength {
			return
		}
	} else if !bytes.HasSuffix(body, []byte("\r\n0\r\n\r\n")) {
		return
	}
	now := nowNs()
	conn.busy = false
	c.open--
	if !bytes.HasPrefix(conn.in, []byte("HTTP/1.1 200")) {
		c.errors++
		c.note(string(conn.in[:min(conn.have, 300)]))
	} else if found := bytes.Count(body, []byte("data: ")); found != c.chunks || !bytes.Contains(body[len(body)-64:], []byte("[DONE]")) {
		c.errors++
		c.note(fmt.Sprintf("an answer with %d events: %s", found, body[max(0, len(body)-300):]))
	} else if conn.startNs >= c.warmEndNs && (c.left >= 0 || now <= c.endNs) {
		c.ttftNs = append(c.ttftNs, int32(min(conn.firstNs-conn.startNs, 1<<31-1)))
		c.totalNs = append(c.totalNs, int32(min(now-conn.startNs, 1<<31-1)))
	}
	if now >= c.warmEndNs && (c.left >= 0 || now <= c.endNs) {
		if c.counted == 0 {
			c.firstNs = now
		}
		c.counted++
		c.lastNs = now
	}
	closes := conn.head.closes
	if closes {
		c.reopen(conn)
	}
	c.start(conn)
}

func (c *client) failed(conn *clientConn, why string) {
	if conn.busy {
		conn.busy = false
		c.open--
		c.errors++
		c.note(why)
	}
	c.reopen(conn)
	c.start(conn)
}

func (c *client) reopen(conn *clientConn) {
	delete(c.conns, int32(conn.fd))
	syscall.Close(conn.fd)
	if c.errors > 1000 {
		fail("more than 1000 errors; the first: " + c.firstError)
	}
	c.dial(conn)
}

func (c *client) note(text string) {
	if c.firstError == "" {
		c.firstError = text
	}
}

func (c *client) tell() {
	seconds := float64(c.lastNs-c.firstNs) / 1e9
	rate := 0.0
	if seconds > 0 {
		rate = float64(c.counted-1) / seconds
	}
	var used syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &used)
	_ = json.NewEncoder(os.Stdout).Encode(map[string]any{
		"requests": c.counted, "errors": c.errors, "first_error": c.firstError, "seconds": seconds, "requests_per_s": rate,
		"ttfb_us": quantiles(c.ttftNs), "total_us": quantiles(c.totalNs), "next": c.next % len(c.prompts), "sent": c.next,
		"cpu_s": time.Duration(used.Utime.Nano() + used.Stime.Nano()).Seconds(),
	})
}

// quantiles, in microseconds.
func quantiles(ns []int32) map[string]float64 {
	slices.Sort(ns)
	out := map[string]float64{}
	if len(ns) == 0 {
		return out
	}
	for name, q := range map[string]float64{"p50": 0.5, "p90": 0.9, "p99": 0.99} {
		out[name] = float64(ns[int(q*float64(len(ns)-1))]) / 1000
	}
	return out
}
