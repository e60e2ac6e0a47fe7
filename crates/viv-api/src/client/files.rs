//! Files, archives, changes of files.

use std::io::{self, Read};

use ureq::BodyReader;
use ureq::http::Method;

use super::events::next_data;
use super::http::{Call, Content};
use super::stream::Lines;
use super::{ClientError, Result, SandboxHandle};
use crate::bound::{ListDepth, Path};
use crate::file::{FileChange, FileListing, FileStat, MakeDir, MoveFile, Unpacked};
use crate::query::{self, encode};
use crate::{header, path};

/// Bytes on their way here. A connection that breaks is an error, not an end.
pub struct Download(BodyReader<'static>);

impl Download {
    pub(super) fn of(response: ureq::http::Response<ureq::Body>) -> Self {
        Self(response.into_body().into_reader())
    }
}

impl Read for Download {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.read(buffer)
    }
}

impl SandboxHandle<'_> {
    /// Reads a file, or a part of it.
    pub fn read_file(&self, query: &query::ReadFile) -> Result<Download> {
        self.download(self.path(path::FILES) + &encode(query), header::BYTES)
    }

    /// Replaces a file as a whole, in one step.
    pub fn write_file(&self, query: &query::WriteFile, content: &mut dyn Read) -> Result<FileStat> {
        // What is large takes time to be written out.
        let mut call = self.call(Call::new(Method::PUT, self.path(path::FILES) + &encode(query)).waits(None));
        call.body = Content::Reader(header::BYTES, content);
        self.client.http.ask(call)
    }

    /// Removes a path with all below it.
    pub fn remove_file(&self, path: &Path) -> Result<()> {
        self.client.http.tell(self.call(Call::new(Method::DELETE, self.at_path(path::FILES, path))))
    }

    /// Lists a directory.
    pub fn list_files(&self, path: &Path, depth: Option<ListDepth>) -> Result<FileListing> {
        let query = query::ListFiles { path: path.clone(), depth, generation: None };
        self.client.http.ask(self.call(Call::get(self.path(path::FILES_LIST) + &encode(&query))))
    }

    /// Looks at a path.
    pub fn stat_file(&self, path: &Path) -> Result<FileStat> {
        self.client.http.ask(self.call(Call::get(self.at_path(path::FILES_STAT, path))))
    }

    /// Moves a path.
    pub fn move_file(&self, request: &MoveFile) -> Result<()> {
        self.client.http.tell(self.call(Call::post(self.path(path::FILES_MOVE)).json(request)))
    }

    /// Makes a directory and those above it.
    pub fn make_dir(&self, path: &Path) -> Result<()> {
        let request = MakeDir { path: path.clone() };
        self.client.http.tell(self.call(Call::post(self.path(path::FILES_MKDIR)).json(&request)))
    }

    /// A path as a tar archive.
    pub fn archive(&self, path: &Path) -> Result<Download> {
        self.download(self.at_path(path::ARCHIVE, path), header::TAR)
    }

    /// Unpacks a tar archive into a directory.
    pub fn unpack(&self, path: &Path, archive: &mut dyn Read) -> Result<Unpacked> {
        let mut call = self.call(Call::new(Method::PUT, self.at_path(path::ARCHIVE, path)).waits(None));
        call.body = Content::Reader(header::TAR, archive);
        self.client.http.ask(call)
    }

    /// Changes below a directory, all that happen after this has answered.
    pub fn watch(&self, path: &Path, recursive: bool) -> Result<Changes> {
        let query = query::WatchFiles { path: path.clone(), recursive, generation: None };
        let call = self.call(Call::get(self.path(path::FILES_WATCH) + &encode(&query)).streams(header::EVENT_STREAM));
        let url = self.client.http.url(&call.path);
        let lines = Lines::new(url.clone(), self.client.http.send(call)?);
        Ok(Changes { url, lines, over: false })
    }

    fn at_path(&self, route: &str, path: &Path) -> String {
        self.path(route) + &encode(&query::PathQuery { path: path.clone(), generation: None })
    }

    fn download(&self, path: String, accept: &'static str) -> Result<Download> {
        let response = self.client.http.send(self.call(Call::get(path).accept(accept)))?;
        Ok(Download::of(response))
    }
}

/// Changes of files as they happen. What happens while a connection is broken is not kept, so this one is not made
/// again by itself: an error is the last item, and then it is time to look at the files again. It ends without one
/// when the sandbox did.
pub struct Changes {
    url: String,
    lines: Lines,
    over: bool,
}

impl Iterator for Changes {
    type Item = Result<FileChange>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.over {
            return None;
        }
        let change = next_data(&mut self.lines).map(|data| {
            data.map(|data| {
                serde_json::from_str(&data).map_err(|error| ClientError::Unexpected {
                    url: self.url.clone(),
                    status: 200,
                    found: error.to_string(),
                })
            })
        });
        let change = change.unwrap_or_else(|error| Some(Err(error)));
        self.over = !matches!(change, Some(Ok(_)));
        change
    }
}
