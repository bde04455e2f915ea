package main

import "bytes"

var (
	endOfHead       = []byte("\r\n\r\n")
	contentLength   = []byte("content-length:")
	chunkedCoding   = []byte("transfer-encoding: chunked")
	connectionClose = []byte("connection: close")
)

// head is what matters of an HTTP/1.1 head. bodyLength is -1 for a chunked body.
type head struct {
	length     int // with the empty line
	bodyLength int
	closes     bool
}

// parseHead reads the head at the start of b; ok is false while it is incomplete.
func parseHead(b []byte) (h head, ok bool) {
	end := bytes.Index(b, endOfHead)
	if end < 0 {
		return h, false
	}
	h.length = end + 4
	for line := b[:end+2]; ; {
		stop := bytes.IndexByte(line, '\n')
		if stop < 0 {
			return h, true
		}
		field := line[:stop]
		line = line[stop+1:]
		if len(field) < 12 {
			continue
		}
		switch field[0] | 0x20 {
		case 'c':
			if hasPrefixFold(field, contentLength) {
				h.bodyLength = number(bytes.TrimSpace(field[len(contentLength):]), 10)
			} else if hasPrefixFold(field, connectionClose) {
				h.closes = true
			}
		case 't':
			if hasPrefixFold(field, chunkedCoding) {
				h.bodyLength = -1
			}
		}
	}
}

func hasPrefixFold(b, lower []byte) bool {
	return len(b) >= len(lower) && bytes.EqualFold(b[:len(lower)], lower)
}

// number reads digits of base 10 or 16; -2: these are none, or too many.
func number(b []byte, base int) int {
	if len(b) == 0 || len(b) > 8 {
		return -2
	}
	n := 0
	for _, c := range b {
		d := 99
		switch {
		case c >= '0' && c <= '9':
			d = int(c - '0')
		case c|0x20 >= 'a' && c|0x20 <= 'f':
			d = int(c|0x20-'a') + 10
		}
		if d >= base {
			return -2
		}
		n = n*base + d
	}
	return n
}

// chunkedEnd tells where the chunked body that starts b ends; -1: not yet, -2: it is none.
func chunkedEnd(b []byte) int {
	at := 0
	for {
		stop := bytes.IndexByte(b[at:], '\n')
		if stop < 0 {
			return -1
		}
		size := number(bytes.TrimSpace(b[at:at+stop]), 16)
		if size < 0 {
			return -2
		}
		at += stop + 1 + size + 2
		if at > len(b) {
			return -1
		}
		if size == 0 {
			return at
		}
	}
}
