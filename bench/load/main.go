// Command load measures HTTP routers: mock workers that cost next to nothing, and a closed-loop client faster than what it measures.
//
//	load worker -n 8 [-writes 2] [-pause-us 0]        answers as vLLM does, from prepared bytes
//	load load -to HOST:PORT[,HOST:PORT] -prompts FILE  sends prompts over C connections, tells times as one JSON object
//
// Both are one thread around epoll on raw sockets, without net/http: on one core together they take some 20 to 40 us a request, so that
// the router is the limit. Linux only. TCP_NODELAY is set on every socket, and TCP_QUICKACK again after every read of something that is not
// complete yet, so that a router that writes without TCP_NODELAY does not wait for a delayed acknowledgement (40 ms) of ours.
package main

import (
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
)

func main() {
	runtime.LockOSThread()
	debug.SetGCPercent(-1)
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case "worker":
			runWorkers(os.Args[2:])
			return
		case "load":
			runLoad(os.Args[2:])
			return
		}
	}
	fail("usage: load worker|load [flags]")
}

func fail(text string) {
	fmt.Fprintln(os.Stderr, text)
	os.Exit(1)
}

func must(doing string, err error) {
	if err != nil {
		fail(doing + ": " + err.Error())
	}
}
