#include "core/net/address.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace farandole {
namespace {

using testing::HasSubstr;

TEST(ParseHostPort, TakesNamesAndAddresses) {
  for (const char* text : {"node7:29500", "10.0.0.1:0", "[::1]:65535", "[fe80::1%eth0]:29500"}) {
    Result<HostPort> parsed = ParseHostPort(text);
    ASSERT_TRUE(parsed.ok()) << parsed.status().ToString();
    EXPECT_EQ(Format(parsed.value()), text);
  }
}

TEST(ParseHostPort, SaysWhatIsWrong) {
  const auto message = [](const std::string& text) {
    return ParseHostPort(text).status().message();
  };
  EXPECT_THAT(message("node7"), HasSubstr("no port"));
  EXPECT_THAT(message("node7:"), HasSubstr("the port is not a number"));
  EXPECT_THAT(message("node7:65536"), HasSubstr("the port is not a number"));
  EXPECT_THAT(message("node7:-1"), HasSubstr("the port is not a number"));
  EXPECT_THAT(message("node7:80x"), HasSubstr("the port is not a number"));
  EXPECT_THAT(message(":80"), HasSubstr("no host"));
  EXPECT_THAT(message(std::string(256, 'a') + ":80"), HasSubstr("no host"));
  EXPECT_THAT(message("::1:80"), HasSubstr("stands in brackets"));
  EXPECT_THAT(message("[node7]:80"), HasSubstr("stands in brackets"));
  EXPECT_THAT(message("no de:80"), HasSubstr("characters"));
}

TEST(SocketAddress, IsWhatItsTextSays) {
  for (const char* text : {"10.1.2.3:80", "[fd00::1]:29500", "127.0.0.1:0"}) {
    EXPECT_EQ(ParseSocketAddress(text).value().ToString(), text);
  }
  EXPECT_EQ(ParseSocketAddress("[::ffff:10.1.2.3]:80").value().ToString(), "10.1.2.3:80");
  EXPECT_FALSE(ParseSocketAddress("node7:80").ok());
  EXPECT_TRUE(ParseSocketAddress("127.0.1.1:0").value().IsLoopback());
  EXPECT_TRUE(ParseSocketAddress("[::1]:0").value().IsLoopback());
  EXPECT_TRUE(ParseSocketAddress("[fe80::1]:0").value().IsLinkLocal());
  EXPECT_TRUE(ParseSocketAddress("169.254.0.1:0").value().IsLinkLocal());
  EXPECT_FALSE(ParseSocketAddress("10.0.0.1:0").value().IsLinkLocal());
}

TEST(SaysLoopback, IsTrueOfWhatIsLoopbackOnEveryHost) {
  EXPECT_TRUE(SaysLoopback({"localhost", 1}));
  EXPECT_TRUE(SaysLoopback({"127.0.0.1", 1}));
  EXPECT_TRUE(SaysLoopback({"::1", 1}));
  EXPECT_FALSE(SaysLoopback({"node7", 1}));
  EXPECT_FALSE(SaysLoopback({"10.0.0.1", 1}));
}

TEST(ParseInterfaces, TakesNamesAndNetworks) {
  const InterfaceList list = ParseInterfaces("eth0,10.1.0.0/16,fd00::/8").value();
  const auto contains = [&](const char* name, const char* address) {
    return Contains(list, name, ParseSocketAddress(address).value());
  };
  EXPECT_TRUE(contains("eth0", "192.168.0.1:0"));
  EXPECT_TRUE(contains("ib0", "10.1.255.1:0"));
  EXPECT_FALSE(contains("ib0", "10.2.0.1:0"));
  EXPECT_TRUE(contains("ib0", "[fd12::1]:0"));
  EXPECT_FALSE(contains("ib0", "[fe80::1]:0"));
}

TEST(ParseInterfaces, WithoutAListAllButLoopbackAndLinkLocalCount) {
  EXPECT_TRUE(Contains({}, "eth0", ParseSocketAddress("10.0.0.1:0").value()));
  EXPECT_FALSE(Contains({}, "lo", ParseSocketAddress("127.0.0.1:0").value()));
  EXPECT_FALSE(Contains({}, "eth0", ParseSocketAddress("[fe80::1]:0").value()));
}

TEST(ParseInterfaces, NamesWhatCannotBeRead) {
  for (const char* text :
       {"10.1.0.0/33", "10.1.0/8", "fd00::/129", "/8", "averyveryverylongname", "a,,b"}) {
    EXPECT_EQ(ParseInterfaces(text).status().code(), Code::kInvalidArgument) << text;
  }
}

}  // namespace
}  // namespace farandole
