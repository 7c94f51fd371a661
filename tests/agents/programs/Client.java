// The JDK's HttpClient with its default version, which offers an upgrade to HTTP/2: a chat, a stream, an error, at once.

import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.util.concurrent.CompletableFuture;
import java.util.stream.Stream;

public class Client {
    static final String URL = System.getenv("AGENT_URL");
    static final String MODEL = System.getenv("AGENT_MODEL");

    static HttpRequest ask(String extra) {
        String body = "{\"model\":\"" + MODEL + "\",\"max_tokens\":8,\"messages\":[{\"role\":\"user\",\"content\":"
            + "\"Name one colour.\"}]" + extra + "}";
        return HttpRequest.newBuilder(URI.create(URL + "/v1/chat/completions"))
            .header("content-type", "application/json")
            .POST(HttpRequest.BodyPublishers.ofString(body)).build();
    }

    static void check(boolean holds, Object what) {
        if (!holds) {
            throw new AssertionError(String.valueOf(what));
        }
    }

    public static void main(String[] arguments) throws Exception {
        HttpClient client = HttpClient.newHttpClient();
        for (int i = 0; i < 3; i++) {
            HttpResponse<String> answer = client.send(ask(""), HttpResponse.BodyHandlers.ofString());
            check(answer.statusCode() == 200 && answer.body().contains("chat.completion"), answer.body());
        }
        HttpResponse<Stream<String>> stream = client.send(ask(",\"stream\":true"), HttpResponse.BodyHandlers.ofLines());
        check(stream.statusCode() == 200, stream.statusCode());
        check(stream.body().anyMatch(line -> line.equals("data: [DONE]")), "no [DONE]");
        HttpResponse<String> refused = client.send(ask(",\"temperature\":-1"), HttpResponse.BodyHandlers.ofString());
        check(refused.statusCode() == 400 && refused.body().contains("temperature"), refused.body());
        HttpRequest models = HttpRequest.newBuilder(URI.create(URL + "/v1/models")).build();
        check(client.send(models, HttpResponse.BodyHandlers.ofString()).body().contains(MODEL), "no model");
        CompletableFuture<HttpResponse<String>> one = client.sendAsync(ask(""), HttpResponse.BodyHandlers.ofString());
        CompletableFuture<HttpResponse<String>> two = client.sendAsync(ask(""), HttpResponse.BodyHandlers.ofString());
        check(one.get().statusCode() == 200 && two.get().statusCode() == 200, "two at once");
        System.out.println("did: chat, stream, an error, two at once, with Upgrade: h2c");
    }
}
