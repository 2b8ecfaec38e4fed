// All sockets of a rank: one thread that sleeps in epoll accepts, connects, proves the job's key,
// reads and writes control streams, and watches the sockets of links. Whoever polls for the next
// event does so in its place, and saves two wake-ups for each frame.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

#include "core/clock.h"
#include "core/doorbell.h"
#include "core/liveness.h"
#include "core/log.h"
#include "core/net/address.h"
#include "core/net/data_streams.h"
#include "core/net/frames.h"
#include "core/net/handshake.h"
#include "core/net/send_meter.h"
#include "core/status.h"

namespace farandole {

struct HubOptions {
  Party party;   ///< Without epoch and joining.
  int size = 1;  ///< Ranks of the job.
  int streams = 1;
  int64_t connect_timeout_ns = 60 * kNsPerSecond;  ///< After the join, for a stream to a rank.
  /// A connected rank that is silent for longer is lost; 0: none is, nor expects signs from this.
  int64_t patience_ns = 0;
  /// Another network carries the work: a rank that cannot be connected is not lost but unwatched.
  bool only_watches = false;
  std::stop_token stop = {};  ///< Ends the waits of a join that is given up; none: never.
  const Clock* clock = nullptr;
  Log* log = nullptr;            ///< May be nullptr.
  Doorbell* doorbell = nullptr;  ///< May be nullptr.
  Liveness* liveness = nullptr;  ///< Of who is lost and what Report sends; may be nullptr.
};

/// What has happened, in its order.
struct HubEvent {
  enum class Kind : uint8_t {
    kFrame,   ///< `type` and `data`.
    kJoined,  ///< The stream to rank 0 is open: `address` is this host's end of it.
    kLost,    ///< `status` says why, as HubOptions::liveness does. Once for a rank, after its last
              ///< complete frame.
  };
  Kind kind = Kind::kFrame;
  int from = 0;             ///< Rank.
  uint64_t connection = 0;  ///< Of a frame or loss on a stream of the role kJoin: which; else 0.
  FrameType type = FrameType::kMessage;
  std::vector<std::byte> data = {};
  SocketAddress address = {};        ///< kJoined, and kRegister: where it came from.
  Refusal refusal = Refusal::kNone;  ///< kLost of the stream to rank 0: what the other end said.
  Status status = {};
};

/// A rank's control stream to another one carries frames one way: from whoever connected. It is
/// opened by the first Send, or by Connect, so two ranks that do so at the same time do not
/// collide. The other way it carries nothing but a goodbye.
///
/// Ranks that have called Connect for each other exchange signs of life, four in the time of
/// `patience_ns`, for which the thread needs nobody's help. Silence is counted in periods that the
/// thread has lived through, and what has come is read before a rank is judged: a machine that
/// stands still as a whole loses nobody. A silent rank is lost as one that is gone, but its streams
/// stay open: should it go on, it learns why it was given up.
///
/// At most 64 accepted connections have not proven the key; each has 2 s for it. A further one
/// takes the place of one that has been silent for a while.
///
/// A rank that lacks descriptors, buffers or memory for 5 s is itself the one that fails: a kLost
/// of its own rank, or of the one that it cannot connect, with its ResourceExhausted.
///
/// Thread safety: any thread, except that Take, Watch and Unwatch are the engine lock's holder's,
/// as in DataStreams. Nothing blocks but WaitForEvent, and Shutdown, which joins the thread.
/// The thread holds the hub's own mutex, never the engine lock, and never for as long as a system
/// call may block. Invariant: a rank is lost at most once, and not after it has said goodbye.
class StreamHub final : public DataStreams {
 public:
  /// @return ResourceExhausted with the system's reason.
  static Result<std::unique_ptr<StreamHub>> Create(const HubOptions& options);
  ~StreamHub() override;
  /// Ends the thread and all control streams: the doorbell is not rung any more. What is Taken
  /// stays open. Once the engine lock's holder is the only one left.
  void Shutdown();

  /// Accepts on a socket that listens, which is taken over.
  Status Listen(int socket);
  /// Rank 0: whether ranks may join, and the tag of this generation of the job.
  void OpenToJoins(bool open, uint32_t epoch);
  /// What a rank is told that registers, within 2 s, when they may not any more.
  void AnswerLate(std::function<std::string(int rank)> answer);
  /// Before Join: the key, where a store says it.
  void SetKey(const JobKey& key);
  JobKey key();
  /// Tries these addresses of rank 0, once each. kJoined or kLost follows; with kJoined the hub has
  /// rank 0's epoch.
  void Join(const std::vector<SocketAddress>& root);
  /// Where rank `rank` listens.
  void SetPeer(int rank, std::vector<SocketAddress> addresses);
  std::vector<SocketAddress> Peer(int rank);

  /// A frame of `from` is awaited, which has to connect for it.
  void Expect(int from);
  /// Opens a control stream to `to`, if there is none, and watches for its signs of life.
  void Connect(int to);
  /// Has the Liveness of all ranks that are watched hear a final error, which cannot wait for the
  /// engine.
  void Report(ByteSpan abort);
  /// Dropped without an error if `to` has said goodbye. @return Unavailable with what the event
  /// says if it is lost and out of reach; InvalidArgument if the frame is too long.
  Status Send(int to, FrameType type, ByteSpan payload);
  /// On a stream of the role kJoin, at either end. `last`: it ends when this has been sent.
  void SendOnJoin(uint64_t connection, FrameType type, ByteSpan payload, bool last);
  /// The next event, if there is one; looks at the sockets where ranks are watched. `reuse`: an
  /// event that is not needed any more.
  std::optional<HubEvent> Next(std::vector<std::byte> reuse = {});
  /// Events that were taken too early are the next ones again.
  void PutBack(std::vector<HubEvent> events);
  /// @return false if there is none when `deadline_ns` has come, or if stopped.
  bool WaitForEvent(int64_t deadline_ns);
  /// Whatever comes. @return false, early, if stopped.
  bool SleepUntil(int64_t deadline_ns);
  /// HubOptions::stop has been requested.
  bool is_stopped() const { return options_.stop.stop_requested(); }
  /// Whether the kernel has taken all frames sent.
  bool Drained();
  /// Says goodbye to all ranks with a stream to or from this one.
  void Leave();
  /// Of the data streams to other hosts that were taken.
  LinkUse Use(int64_t now_ns);
  /// Connections refused so far: "10.0.0.3:4711 holds another job key"; the last few.
  std::string Refused();

  int rank() const override { return options_.party.rank; }
  int size() const override { return options_.size; }
  int streams() const override { return options_.streams; }
  Result<std::optional<int>> Take(const StreamId& stream) override;
  Status Watch(int socket, bool writable) override;
  void Unwatch(int socket) override;

 private:
  struct Connection;
  struct Attempt;
  struct PeerState;
  struct DataEntry {
    int socket = -1;
    bool taken = false;
    bool awaited = false;  // from the other end
    Status failed = {};
  };
  using Key = uint64_t;  // of an outgoing stream: role, peer, plane, number
  static constexpr int kSignsInPatience = 4;

  explicit StreamHub(const HubOptions& options);
  void Run();
  void Wake();
  // All below with mutex_ held.
  bool HandleEvents();
  void Poll();
  void HandleEvent(uint64_t id, uint32_t events);
  void RunTimers(int64_t now_ns);
  int64_t NextTimer() const;
  void AcceptFrom(int listener);
  bool MakeRoom();
  void PauseAccepting(int64_t until_ns);
  void CannotAccept(int error);
  bool AwaitsConnection() const;
  void FailHere(const Status& why);
  void NoteExhaustion(Attempt& attempt, const SocketAddress& address, int error);
  Connection& Add(int socket, bool outgoing, int64_t deadline_ns);
  void Arm(Connection& connection);
  void Close(uint64_t id);
  void Advance(Connection& connection, uint32_t events);
  void FinishConnect(Connection& connection);
  void ReadHandshake(Connection& connection);
  void HandshakeDone(Connection& connection);
  void ReleaseToLink(Connection& connection);
  bool IsWanted(const Connection& connection);
  void ReadFrames(Connection& connection);
  bool TakeFrames(Connection& connection);
  bool TakeFrame(Connection& connection, const StreamReader::Frame& frame);
  bool Flush(Connection& connection);
  void Break(uint64_t id, const std::string& why, bool definite);
  void LosePeer(int rank, const Status& why);
  void NoteLoss(int rank, const Status& why);
  void Lose(const Status& why);
  void TakeSign(int from, ByteSpan payload);
  void SendSign(Connection& connection);
  void Beat();
  void CheckSilence(int rank);
  void WarnOf(const Status& unwatched);
  int64_t period_ns() const;
  void ReadRest(Connection& connection);
  void Refuse(const Connection& connection, const std::string& why);
  void Append(Connection& connection, FrameType type, ByteSpan payload);
  void Ring();
  void Start(const StreamHello& hello, int peer, std::vector<SocketAddress> addresses);
  void TryNext(Attempt& attempt);
  void EndRound(Attempt& attempt);
  void Fail(const Attempt& attempt);
  void Push(HubEvent event);
  DataEntry& Entry(const StreamId& stream);
  static int PeerOf(Key key);
  static Key KeyOf(StreamRole role, int peer, int plane, int number);

  HubOptions options_;
  int epoll_ = -1;
  int wake_ = -1;  // eventfd
  std::mutex mutex_;
  std::condition_variable has_event_;
  std::deque<HubEvent> events_;
  std::vector<std::byte> spare_;  // a buffer of an event that was handed out
  std::vector<std::byte> received_;
  std::map<uint64_t, int> listeners_;  // sockets by id
  std::map<uint64_t, std::unique_ptr<Connection>> connections_;
  std::map<Key, std::unique_ptr<Attempt>> attempts_;
  std::map<Key, DataEntry> data_;
  SendMeter sent_;                // by data streams to other hosts
  std::vector<PeerState> peers_;  // by rank
  std::vector<int> watched_;      // ranks
  int64_t beat_ns_ = kNever;      // when signs of life are due
  const std::string host_;        // of this rank
  bool has_warned_ = false;
  std::deque<std::string> refused_;
  int64_t paused_until_ns_ = 0;  // accepting, for want of descriptors or of room
  int64_t exhausted_ns_ = 0;     // since when it has lacked them; 0: it has not
  int64_t last_exhausted_ns_ = 0;
  bool has_warned_of_accepting_ = false;
  bool has_failed_ = false;  // for want of them
  uint64_t next_id_ = 2;
  bool stops_ = false;
  bool polls_ = false;  // whoever has called Next, now
  int64_t polled_ns_ = INT64_MIN / 2;
  int64_t timer_ns_ = kNever;  // that the thread knows of
  bool joins_are_open_ = false;
  std::function<std::string(int rank)> late_answer_;
  std::thread thread_;
  std::stop_callback<std::function<void()>> on_stop_;
};

}  // namespace farandole
