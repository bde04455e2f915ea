package main

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"strings"
	"syscall"
)

// Every completion is answered as a stream: what the load asks for. An answer has this many chunks: 15 tokens, the usage, and [DONE].
const answerChunks = 17

const modelName = "bench-model"

type workerServer struct {
	epoll     int
	listeners map[int32]bool
	conns     map[int32]*workerConn
	stream    []byte   // head and all chunks
	ends      []int    // where chunk i ends in `stream`
	cuts      []int    // where a write ends
	buffers   [][]byte // of connections that are closed
	pauseNs   int64
	waiting   []pendingChunk // in order of time
}

type workerConn struct {
	fd     int
	in     []byte
	have   int
	closes bool
	open   bool
}

type pendingChunk struct {
	conn *workerConn
	next int
	atNs int64
}

func runWorkers(args []string) {
	flags := flag.NewFlagSet("worker", flag.ExitOnError)
	n := flags.Int("n", 8, "workers, each on a port of its own")
	writes := flags.Int("writes", 2, "writes of an answer without pauses, 1 to 17: the head with the first chunk, then the rest evenly")
	pauseUs := flags.Int("pause-us", 0, "between the chunks of an answer, each of which is then a write of its own")
	_ = flags.Parse(args)
	epoll, err := syscall.EpollCreate1(syscall.EPOLL_CLOEXEC)
	must("epoll", err)
	s := &workerServer{epoll: epoll, listeners: map[int32]bool{}, conns: map[int32]*workerConn{}}
	s.makeAnswer()
	if !s.answerIn(*writes, *pauseUs) {
		fail("-writes must be 1 to 17, -pause-us not negative")
	}
	ports := []int{}
	for i := 0; i < *n; i++ {
		fd, port := listen(0)
		s.listeners[int32(fd)] = true
		must("epoll", syscall.EpollCtl(epoll, syscall.EPOLL_CTL_ADD, fd, &syscall.EpollEvent{Events: syscall.EPOLLIN, Fd: int32(fd)}))
		ports = append(ports, port)
	}
	_ = json.NewEncoder(os.Stdout).Encode(map[string]any{"ports": ports})
	s.serve()
}

func (s *workerServer) makeAnswer() {
	const id = `"id":"chatcmpl-8f14e45fceea4d3ab2c1d5a7c0f6b9e2","object":"chat.completion.chunk",` +
		`"created":1790000000,"model":"` + modelName + `"`
	events := []string{}
	for i := 0; i < answerChunks-2; i++ {
		content, reason := `"content":" token"`, "null"
		if i == 0 {
			content = `"role":"assistant","content":""`
		}
		if i == answerChunks-3 {
			reason = `"length"`
		}
		choice := `{"index":0,"delta":{` + content + `},"logprobs":null,"finish_reason":` + reason + `,"token_ids":null}`
		events = append(events, `{`+id+`,"choices":[`+choice+`]}`)
	}
	const usage = `"usage":{"prompt_tokens":1000,"total_tokens":1015,"completion_tokens":15,"prompt_tokens_details":{"cached_tokens":900}}`
	events = append(events, `{`+id+`,"choices":[],`+usage+`}`, "[DONE]")
	s.stream = []byte("HTTP/1.1 200 OK\r\ndate: Mon, 30 Nov 2026 00:00:00 GMT\r\nserver: uvicorn\r\n" +
		"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n")
	for _, event := range events {
		data := "data: " + event + "\n\n"
		s.stream = append(s.stream, fmt.Sprintf("%x\r\n%s\r\n", len(data), data)...)
		s.ends = append(s.ends, len(s.stream))
	}
	s.stream = append(s.stream, "0\r\n\r\n"...)
	s.ends[answerChunks-1] = len(s.stream)
}

// answerIn sets how answers are written from now on: in so many writes at once, or with a pause between all chunks.
func (s *workerServer) answerIn(writes, pauseUs int) bool {
	if writes < 1 || writes > answerChunks || pauseUs < 0 {
		return false
	}
	s.pauseNs, s.cuts = int64(pauseUs)*1000, s.cuts[:0]
	for i := 0; i < writes-1; i++ {
		s.cuts = append(s.cuts, s.ends[i*(answerChunks-1)/(writes-1)])
	}
	s.cuts = append(s.cuts, len(s.stream))
	return true
}

func plainAnswer(status, kind, body string) []byte {
	return []byte(fmt.Sprintf("HTTP/1.1 %s\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n%s", status, kind, len(body), body))
}

func (s *workerServer) serve() {
	events := make([]syscall.EpollEvent, 256)
	for {
		n := wait(s.epoll, events, s.timeoutMs())
		for i := 0; i < n; i++ {
			fd := events[i].Fd
			if s.listeners[fd] {
				s.accept(int(fd))
			} else if c := s.conns[fd]; c != nil && events[i].Events&^syscall.EPOLLOUT != 0 {
				s.readable(c)
			}
		}
		if len(s.waiting) > 0 {
			s.sendDue()
		}
	}
}

func (s *workerServer) timeoutMs() int {
	if len(s.waiting) == 0 {
		return -1
	}
	left := s.waiting[0].atNs - nowNs()
	if left <= 0 {
		return 0
	}
	return int((left + 999_999) / 1_000_000)
}

// sendDue writes the chunks whose time has come. Every chunk but the first, which does not wait,
// waits equally long, so the queue is nearly in order of time.
func (s *workerServer) sendDue() {
	now := nowNs()
	done := 0
	for _, p := range s.waiting {
		if p.atNs > now {
			break
		}
		done++
		if !p.conn.open {
			continue
		}
		from := 0
		if p.next > 0 {
			from = s.ends[p.next-1]
		}
		s.send(p.conn, s.stream[from:s.ends[p.next]])
		if p.next+1 < answerChunks {
			s.waiting = append(s.waiting, pendingChunk{p.conn, p.next + 1, now + s.pauseNs})
		} else if p.conn.closes {
			s.drop(p.conn)
		}
	}
	if done > 0 {
		s.waiting = append(s.waiting[:0], s.waiting[done:]...)
	}
}

func (s *workerServer) accept(listener int) {
	for {
		fd, _, err := syscall.Accept4(listener, syscall.SOCK_CLOEXEC)
		if err != nil {
			return
		}
		prepare(fd)
		c := &workerConn{fd: fd, open: true}
		if k := len(s.buffers); k > 0 {
			c.in, s.buffers = s.buffers[k-1], s.buffers[:k-1]
		} else {
			c.in = make([]byte, 256<<10)
		}
		s.conns[int32(fd)] = c
		must("epoll", watch(s.epoll, fd))
	}
}

func (s *workerServer) readable(c *workerConn) {
	for c.open {
		if c.have == len(c.in) {
			c.in = append(c.in, make([]byte, len(c.in))...)
		}
		room := len(c.in) - c.have
		n, e := read(c.fd, c.in[c.have:])
		if e == syscall.EAGAIN {
			return
		}
		if n <= 0 || e != 0 {
			s.drop(c)
			return
		}
		c.have += n
		s.requests(c)
		if n < room {
			if c.have > 0 && c.open {
				quickAck(c.fd)
			}
			return
		}
	}
}

// requests answers what is complete in the connection's buffer.
func (s *workerServer) requests(c *workerConn) {
	at := 0
	for c.open && at < c.have {
		b := c.in[at:c.have]
		h, ok := parseHead(b)
		if !ok {
			break
		}
		length := h.bodyLength
		if length < 0 {
			length = chunkedEnd(b[h.length:])
			if length == -2 {
				s.drop(c)
				return
			}
		}
		if length < 0 || h.length+length > len(b) {
			break
		}
		c.closes = h.closes
		s.answer(c, b[:h.length])
		at += h.length + length
	}
	if at > 0 && c.open {
		copy(c.in, c.in[at:c.have])
		c.have -= at
	}
}

func (s *workerServer) answer(c *workerConn, head []byte) {
	if bytes.HasPrefix(head, []byte("POST /_bench/answer?")) {
		writes, pauseUs := 0, 0
		_, _ = fmt.Sscanf(string(head[20:]), "writes=%d&pause_us=%d", &writes, &pauseUs)
		if !s.answerIn(writes, pauseUs) {
			s.send(c, plainAnswer("400 Bad Request", "text/plain", "want writes=1..17&pause_us=N"))
		} else {
			s.send(c, plainAnswer("200 OK", "text/plain", ""))
		}
	} else if !bytes.HasPrefix(head, []byte("POST ")) {
		words := bytes.SplitN(head, []byte(" "), 3)
		if len(words) < 3 || !bytes.HasPrefix(words[2], []byte("HTTP/1.")) {
			s.drop(c) // a probe for gRPC
			return
		}
		s.send(c, page(string(words[1])))
	} else if !bytes.HasPrefix(head, []byte("POST /v1/chat/completions")) && !bytes.HasPrefix(head, []byte("POST /v1/completions")) {
		s.send(c, plainAnswer("404 Not Found", "application/json", `{"error":{"message":"not here","code":404}}`))
	} else if s.pauseNs > 0 {
		s.waiting = append(s.waiting, pendingChunk{c, 0, nowNs()})
		return
	} else {
		from := 0
		for _, to := range s.cuts {
			s.send(c, s.stream[from:to])
			from = to
		}
	}
	if c.closes && c.open {
		s.drop(c)
	}
}

// send writes at once; what does not fit into the socket's buffer (a router that stopped reading) ends the connection.
func (s *workerServer) send(c *workerConn, b []byte) {
	if n, e := write(c.fd, b); c.open && (e != 0 || n < len(b)) {
		s.drop(c)
	}
}

func (s *workerServer) drop(c *workerConn) {
	if c.open {
		c.open = false
		delete(s.conns, int32(c.fd))
		s.buffers = append(s.buffers, c.in)
		syscall.Close(c.fd)
	}
}

// page answers what routers and their health checks ask of an engine.
func page(path string) []byte {
	path, _, _ = strings.Cut(path, "?")
	switch path {
	case "/health", "/health_generate", "/ping":
		return plainAnswer("200 OK", "text/plain", "")
	case "/v1/models":
		return plainAnswer("200 OK", "application/json", `{"object":"list","data":[{"id":"`+modelName+
			`","object":"model","created":1790000000,"owned_by":"vllm","root":"`+modelName+`","parent":null,"max_model_len":131072}]}`)
	case "/get_model_info", "/model_info":
		return plainAnswer("200 OK", "application/json", `{"model_path":"`+modelName+`","tokenizer_path":"`+modelName+`","is_generation":true}`)
	case "/get_server_info", "/server_info":
		return plainAnswer("200 OK", "application/json", `{"model_id":"`+modelName+`","served_model_name":"`+modelName+
			`","model_path":"`+modelName+`","tp_size":1,"dp_size":1,"max_total_tokens":1000000,"version":"bench"}`)
	case "/version":
		return plainAnswer("200 OK", "application/json", `{"version":"0.32.0"}`)
	case "/metrics":
		return plainAnswer("200 OK", "text/plain; version=0.0.4; charset=utf-8",
			"# TYPE vllm:cache_config_info gauge\n"+`vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100000"} 1.0`+"\n"+
				fmt.Sprintf("# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{engine=\"0\",model_name=%q} 0.0\n", modelName))
	}
	return plainAnswer("404 Not Found", "application/json", `{"detail":"Not Found"}`)
}
