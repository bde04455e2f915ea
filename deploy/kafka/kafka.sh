#!/usr/bin/env bash
# A real Apache Kafka broker (KRaft, one node, loopback only) for development and tests, from Maven Central's jars.
#
#   kafka.sh start  [--data DIR] [--port N] [--owner PID]   start it, wait until it answers, print the bootstrap address
#   kafka.sh stop   [--data DIR]                            end that broker, and only that
#   kafka.sh status [--data DIR]                            print the bootstrap address; exit 3 when it is not running
#
# DIR (default: data/kafka in the working directory) holds the records, the logs and broker.env (pid, port, bootstrap).
# With --owner the broker ends within a second or two after that process has, however it ended.
# Without --port the ports of the last start are used again, or free ones are taken. Needs Java 17 or newer, and Maven the first time.
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
LIB=$HERE/lib
START_LIMIT_S=60

die() { echo "kafka.sh: $*" >&2; exit 1; }

COMMAND=${1:-}
[ $# -gt 0 ] && shift
DATA=data/kafka
PORT_GIVEN=
OWNER=
while [ $# -gt 0 ]; do
  case $1 in
    --data) DATA=${2:?--data needs a folder}; shift 2 ;;
    --port) PORT_GIVEN=${2:?--port needs a number}; shift 2 ;;
    --owner) OWNER=${2:?--owner needs a process id}; shift 2 ;;
    *) die "unknown argument '$1' (known: --data DIR, --port N, --owner PID)" ;;
  esac
done
case ${PORT_GIVEN:-1} in *[!0-9]*) die "--port '$PORT_GIVEN' must be a number" ;; esac
case ${OWNER:-1} in *[!0-9]*) die "--owner '$OWNER' must be a process id" ;; esac
mkdir -p "$DATA"
DATA=$(cd "$DATA" && pwd)
STATE=$DATA/broker.env
PID= PORT= CONTROLLER_PORT= BOOTSTRAP=
# shellcheck disable=SC1090
[ -f "$STATE" ] && . "$STATE"

# True when PID is a broker of this data folder, and not some other process that got the number later.
running() {
  [ -n "$PID" ] && [ -r "/proc/$PID/cmdline" ] && tr '\0' '\n' <"/proc/$PID/cmdline" | grep -qxF "$DATA/server.properties"
}

listens() { (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }

# Below the ephemeral range, so that no outgoing connection can take the port between two starts.
free_port() {
  local port
  for _ in $(seq 50); do
    port=$((15000 + (RANDOM * 32768 + RANDOM) % 17000))
    listens "$port" || { echo "$port"; return; }
  done
  die "found no free port between 15000 and 32000"
}

need_java() {
  command -v java >/dev/null || die "java is missing: install Java 17 or newer (Debian: apt-get install openjdk-17-jre-headless)"
  local version
  version=$(java -version 2>&1 | sed -n 's/.* version "\([0-9]*\).*/\1/p' | head -1)
  [ "${version:-0}" -ge 17 ] || die "java is version ${version:-unknown}, Kafka 4 needs 17 or newer"
}

fetch_jars() {
  local want
  want=$(cksum <"$HERE/pom.xml")
  exec 9>"$HERE/.lib.lock"
  flock 9
  if [ "$(cat "$LIB/.complete" 2>/dev/null)" != "$want" ]; then
    command -v mvn >/dev/null || die "mvn is missing and the jars are not there yet: install Maven (Debian: apt-get install maven)"
    echo "fetching Kafka's jars with Maven (once) ..." >&2
    rm -rf "$LIB"
    (cd "$HERE" && mvn -q -B dependency:copy-dependencies -DincludeScope=runtime -DoutputDirectory=lib >&2) ||
      die "Maven could not fetch the jars (see above)"
    echo "$want" >"$LIB/.complete"
  fi
  flock -u 9
  exec 9>&-
}

write_state() {
  printf 'PID=%s\nPORT=%s\nCONTROLLER_PORT=%s\nBOOTSTRAP=127.0.0.1:%s\n' "$PID" "$PORT" "$CONTROLLER_PORT" "$PORT" >"$STATE.tmp"
  mv "$STATE.tmp" "$STATE"
}

start() {
  if running; then
    [ -z "$PORT_GIVEN" ] || [ "$PORT_GIVEN" = "$PORT" ] || die "already runs on port $PORT: stop it first"
    echo "$BOOTSTRAP"
    return
  fi
  need_java
  fetch_jars
  PORT=${PORT_GIVEN:-${PORT:-$(free_port)}}
  CONTROLLER_PORT=${CONTROLLER_PORT:-$(free_port)}
  ! listens "$PORT" || die "port $PORT is in use: give another with --port"
  ! listens "$CONTROLLER_PORT" || CONTROLLER_PORT=$(free_port)
  sed -e "s|@PORT@|$PORT|g" -e "s|@CONTROLLER_PORT@|$CONTROLLER_PORT|g" -e "s|@DATA@|$DATA|g" \
    "$HERE/server.properties" >"$DATA/server.properties"
  cp "$HERE/log4j2.properties" "$DATA/log4j2.properties"
  local java_options=(-XX:+UseSerialGC "-Dlog4j2.configurationFile=$DATA/log4j2.properties" "-Dkafka.logs.dir=$DATA" -cp "$LIB/*")
  if [ ! -f "$DATA/log/meta.properties" ]; then
    local cluster_id
    cluster_id=$(head -c 16 /dev/urandom | base64 | tr '+/' '-_' | cut -c1-22 | sed 's/^-/A/')
    java -Xmx128m -XX:TieredStopAtLevel=1 "${java_options[@]}" kafka.tools.StorageTool format -t "$cluster_id" \
      -c "$DATA/server.properties" >"$DATA/format.out" 2>&1 || die "formatting $DATA failed: $(tail -3 "$DATA/format.out")"
  fi
  [ ! -f "$DATA/kafka.log" ] || mv "$DATA/kafka.log" "$DATA/kafka.log.previous"
  nohup setsid java -Xms128m -Xmx512m "${java_options[@]}" kafka.Kafka "$DATA/server.properties" </dev/null >"$DATA/kafka.out" 2>&1 &
  PID=$!
  write_state
  if [ -n "$OWNER" ]; then
    # shellcheck disable=SC2016
    nohup setsid bash -c 'while kill -0 "$1" && kill -0 "$2"; do sleep 1; done; kill "$2"' broker-watch "$OWNER" "$PID" \
      </dev/null >/dev/null 2>&1 &
  fi
  local deadline=$((SECONDS + START_LIMIT_S))
  until grep -q 'Kafka Server started' "$DATA/kafka.log" 2>/dev/null && listens "$PORT"; do
    kill -0 "$PID" 2>/dev/null || die "the broker ended while starting: $(tail -5 "$DATA/kafka.out" "$DATA/kafka.log" 2>/dev/null)"
    [ $SECONDS -lt $deadline ] || { stop; die "no answer after $START_LIMIT_S s: see $DATA/kafka.log"; }
    sleep 0.1
  done
  echo "127.0.0.1:$PORT"
}

stop() {
  running || { echo "not running" >&2; return 0; }
  kill "$PID"
  for _ in $(seq 200); do
    running || return 0
    sleep 0.1
  done
  kill -9 "$PID"
}

case $COMMAND in
  start) start ;;
  stop) stop ;;
  status) if running; then echo "$BOOTSTRAP"; else echo "not running"; exit 3; fi ;;
  *) die "use: kafka.sh start|stop|status [--data DIR] [--port N] [--owner PID]" ;;
esac
