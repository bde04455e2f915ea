package main

import (
	"net"
	"strconv"
	"syscall"
	"time"
	"unsafe"
)

const (
	tcpQuickAck   = 12
	sockBuffer    = 1 << 20 // a 64 KB prompt goes out in one write
	edgeTriggered = 1 << 31
	watchFor      = syscall.EPOLLIN | syscall.EPOLLOUT | syscall.EPOLLRDHUP | edgeTriggered
)

// System calls go past Go's scheduler, the waiting one too: there is nothing else to run, and otherwise the runtime's monitor thread
// wakes every 20 us to take the processor away from a thread that waits. Hence also no garbage collection (main.go) and no allocation
// for a request.

func read(fd int, into []byte) (int, syscall.Errno) {
	n, _, e := syscall.RawSyscall(syscall.SYS_READ, uintptr(fd), uintptr(unsafe.Pointer(&into[0])), uintptr(len(into)))
	return int(n), e
}

func write(fd int, from []byte) (int, syscall.Errno) {
	n, _, e := syscall.RawSyscall(syscall.SYS_WRITE, uintptr(fd), uintptr(unsafe.Pointer(&from[0])), uintptr(len(from)))
	return int(n), e
}

func writev(fd int, parts []syscall.Iovec) (int, syscall.Errno) {
	n, _, e := syscall.RawSyscall(syscall.SYS_WRITEV, uintptr(fd), uintptr(unsafe.Pointer(&parts[0])), uintptr(len(parts)))
	return int(n), e
}

func wait(epoll int, events []syscall.EpollEvent, timeoutMs int) int {
	n, _, e := syscall.RawSyscall6(syscall.SYS_EPOLL_PWAIT, uintptr(epoll), uintptr(unsafe.Pointer(&events[0])), uintptr(len(events)),
		uintptr(timeoutMs), 0, 0)
	if e == syscall.EINTR {
		return 0
	}
	if e != 0 {
		fail("epoll_wait: " + e.Error())
	}
	return int(n)
}

func iovec(b []byte) syscall.Iovec {
	return syscall.Iovec{Base: &b[0], Len: uint64(len(b))}
}

func quickAck(fd int) {
	one := int32(1)
	syscall.RawSyscall6(syscall.SYS_SETSOCKOPT, uintptr(fd), syscall.IPPROTO_TCP, tcpQuickAck, uintptr(unsafe.Pointer(&one)), 4, 0)
}

func prepare(fd int) {
	must("nonblocking", syscall.SetNonblock(fd, true))
	must("TCP_NODELAY", syscall.SetsockoptInt(fd, syscall.IPPROTO_TCP, syscall.TCP_NODELAY, 1))
}

func watch(epoll, fd int) error {
	event := syscall.EpollEvent{Fd: int32(fd)}
	events := uint32(watchFor)
	event.Events = events
	return syscall.EpollCtl(epoll, syscall.EPOLL_CTL_ADD, fd, &event)
}

func listen(port int) (fd int, bound int) {
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	must("socket", err)
	must("SO_REUSEADDR", syscall.SetsockoptInt(fd, syscall.SOL_SOCKET, syscall.SO_REUSEADDR, 1))
	must("SO_RCVBUF", syscall.SetsockoptInt(fd, syscall.SOL_SOCKET, syscall.SO_RCVBUF, sockBuffer))
	must("bind", syscall.Bind(fd, &syscall.SockaddrInet4{Port: port, Addr: [4]byte{127, 0, 0, 1}}))
	must("listen", syscall.Listen(fd, 1024))
	must("nonblocking", syscall.SetNonblock(fd, true))
	name, err := syscall.Getsockname(fd)
	must("getsockname", err)
	return fd, name.(*syscall.SockaddrInet4).Port
}

// connect opens a connection to HOST:PORT (an IPv4 address), and waits for it.
func connect(address string) (int, error) {
	host, portText, err := net.SplitHostPort(address)
	if err != nil {
		return 0, err
	}
	port, err := strconv.Atoi(portText)
	if err != nil {
		return 0, err
	}
	ip := net.ParseIP(host).To4()
	if ip == nil {
		return 0, &net.AddrError{Err: "want an IPv4 address", Addr: address}
	}
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	if err := syscall.SetsockoptInt(fd, syscall.SOL_SOCKET, syscall.SO_SNDBUF, sockBuffer); err != nil {
		return 0, err
	}
	if err := syscall.Connect(fd, &syscall.SockaddrInet4{Port: port, Addr: [4]byte(ip)}); err != nil {
		syscall.Close(fd)
		return 0, err
	}
	prepare(fd)
	return fd, nil
}

var processStart = time.Now()

// nowNs is monotonic.
func nowNs() int64 { return int64(time.Since(processStart)) }
